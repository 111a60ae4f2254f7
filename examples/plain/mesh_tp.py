"""Tensor parallel by hand: `torchrun --nproc-per-node 2 examples/plain/mesh_tp.py`. Its run file: mesh_tp.yaml."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mesh_common import CLIP, LR, build_model, loss_of, train
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = build_model()
plan = {
    **{f"model.layers.*.self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    **{f"model.layers.*.mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")},
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}
parallelize_module(model, mesh, plan)
split = [p for p in model.parameters() if isinstance(p, DTensor)]
whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
optimizer = torch.optim.AdamW([{"params": split}, {"params": whole}], lr=LR)


def clip() -> None:
    """torch.nn.utils.clip_grad_norm_ takes no mixture of DTensors and others."""
    parts = [p.grad.to_local() for p in split]
    squares = torch.stack(torch._foreach_norm(parts)).square().sum()
    dist.all_reduce(squares)
    others = [p.grad for p in whole]
    norm = (squares + torch.stack(torch._foreach_norm(others)).square().sum()).sqrt()
    torch._foreach_mul_(parts + others, (CLIP / (norm + 1e-6)).clamp(max=1.0))


def step(inputs: Tensor, targets: Tensor) -> float:
    loss = loss_of(model(inputs).logits, targets)
    loss.backward()
    clip()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


train(step)
