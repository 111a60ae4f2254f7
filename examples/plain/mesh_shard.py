"""Sharded data parallel by hand: `torchrun --nproc-per-node 2 examples/plain/mesh_shard.py`. Its run file:
mesh_shard.yaml."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mesh_common import CLIP, LR, build_model, loss_of, train
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
model = build_model()
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)


def step(inputs: Tensor, targets: Tensor) -> float:
    loss = loss_of(model(inputs[rank::world]).logits, targets[rank::world])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


train(step)
