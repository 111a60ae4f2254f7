"""DeepSpeed's ZeRO-2 by hand: `torchrun --nproc-per-node 2 examples/plain/zero2.py`. Its run file: zero2.yaml."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings

import deepspeed
import torch
import torch.distributed as dist
from net import build_model, train_data

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 120
BATCH, WARM_UP = 64, min(20, STEPS // 2)

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", r"`torch.distributed.\w+_tensor` is deprecated", FutureWarning)
dist.init_process_group("gloo")
# otherwise DeepSpeed compiles its shared-memory collectives for two minutes first
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = build_model()
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    config={
        "train_micro_batch_size_per_gpu": BATCH // world,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000},
        "zero_allow_untested_optimizer": True,
    },
)
images, labels = train_data.tensors
order: list[torch.Tensor] = []
for step in range(STEPS):
    if step == WARM_UP:
        start = time.perf_counter()
    if not order:  # the same on all ranks: they share the seed
        order = list(torch.randperm(len(train_data)).split(BATCH))
    batch = order.pop()[rank::world]
    loss = torch.nn.functional.cross_entropy(engine(images[batch]), labels[batch])
    engine.backward(loss)
    engine.step()
rate = (STEPS - WARM_UP) * BATCH / (time.perf_counter() - start)
if rank == 0:
    print(json.dumps({"samples_per_second": rate, "loss": loss.item()}))
dist.destroy_process_group()
