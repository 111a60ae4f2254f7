"""Accelerate by hand: `torchrun --nproc-per-node 2 examples/plain/accelerate_ddp.py`. Run file: accelerate_ddp.yaml."""

from __future__ import annotations

import json
import sys
import time

import torch
from accelerate import Accelerator
from net import build_model, train_data

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 120
BATCH, WARM_UP = 64, min(20, STEPS // 2)

accelerator = Accelerator(cpu=True)
rank, world = accelerator.process_index, accelerator.num_processes
torch.manual_seed(0)
model = build_model()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True))
images, labels = train_data.tensors
order: list[torch.Tensor] = []
for step in range(STEPS):
    if step == WARM_UP:
        start = time.perf_counter()
    if not order:  # the same on all ranks: they share the seed
        order = list(torch.randperm(len(train_data)).split(BATCH))
    batch = order.pop()[rank::world]
    loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
rate = (STEPS - WARM_UP) * BATCH / (time.perf_counter() - start)
if rank == 0:
    print(json.dumps({"samples_per_second": rate, "loss": loss.item()}))
accelerator.end_training()
