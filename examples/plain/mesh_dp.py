"""Replicated data parallel by hand: `torchrun --nproc-per-node 2 examples/plain/mesh_dp.py`. Its run file:
mesh_dp.yaml."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mesh_common import CLIP, LR, build_model, loss_of, train
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = build_model()
replica = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)


def step(inputs: Tensor, targets: Tensor) -> float:
    loss = loss_of(replica(inputs[rank::world]).logits, targets[rank::world])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


train(step)
