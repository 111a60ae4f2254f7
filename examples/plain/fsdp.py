"""FSDP2 by hand: `torchrun --nproc-per-node 2 examples/plain/fsdp.py`. Its run file: fsdp.yaml."""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from net import Block, build_model, train_data
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 120
BATCH, WARM_UP = 64, min(20, STEPS // 2)

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(0)
model = build_model()
for module in model.modules():
    if isinstance(module, Block):
        fully_shard(module, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
images, labels = train_data.tensors
order: list[torch.Tensor] = []
for step in range(STEPS):
    if step == WARM_UP:
        start = time.perf_counter()
    if not order:  # the same on all ranks: they share the seed
        order = list(torch.randperm(len(train_data)).split(BATCH))
    batch = order.pop()[rank::world]
    loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
rate = (STEPS - WARM_UP) * BATCH / (time.perf_counter() - start)
if rank == 0:
    print(json.dumps({"samples_per_second": rate, "loss": loss.item()}))
dist.destroy_process_group()
