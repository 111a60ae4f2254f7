"""Context parallel by hand (Ulysses): `torchrun --nproc-per-node 2 examples/plain/mesh_cp.py`. Its run file:
mesh_cp.yaml."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from mesh_common import CLIP, LENGTH, LR, build_model, loss_of, train
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def traded(tensor: Tensor, give: int, join: int) -> Tensor:
    """Dimension `give` is dealt to the ranks, what comes from them is joined in dimension `join`."""
    sent = torch.stack(tensor.chunk(world, give)).contiguous()
    got = all_to_all_single_autograd(sent.flatten(0, 1), None, None, dist.group.WORLD).view(sent.shape)
    return torch.cat(list(got), dim=join)


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **how: Any) -> Any:
    heads = (traded(t, 1, 2) for t in (query, key, value))
    found, _ = sdpa_attention_forward(module, *heads, mask, **how)
    return traded(found, 1, 2), None


AttentionInterface.register("traded", attention)
model = build_model()
model.set_attn_implementation("traded")
replica = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
own = slice(rank * LENGTH // world, (rank + 1) * LENGTH // world)


def step(inputs: Tensor, targets: Tensor) -> float:
    positions = torch.arange(LENGTH)[None, own].expand(len(inputs), -1)
    loss = loss_of(replica(inputs[:, own], position_ids=positions).logits, targets[:, own])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


train(step)
