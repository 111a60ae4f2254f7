"""The training loop of a tutorial in every precision, by PyTorch's own means: what parity is measured against."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
LR, MOMENTUM, CLIP = 0.1, 0.9, 1.0


@dataclass
class Curve:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], batches: Sequence[Batch], precision: str, device: str
) -> Curve:
    """SGD with momentum and clipping over the batches.

    precision: of drivetrain's table. fp32 and tf32 set the switch of matrix products; bf16 and fp16 cast the model;
    -mixed runs under autocast; -master computes with copies of fp32 weights in 16 bits; fp8-mixed converts the linear
    layers by torchao. The loss is scaled where the products are in fp16 and the weights in fp32.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    compute, _, kind = precision.partition("-")
    dtype = COMPUTE.get(compute)
    model = model.to(device)
    if compute == "fp8":
        model = _in_fp8(model)
    if dtype is not None and not kind:
        model = model.to(dtype)
    scaler = torch.amp.GradScaler(device, enabled=compute == "fp16" and bool(kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    forward: Callable[[Tensor], Tensor] = _with_copies(model, dtype) if kind == "master" and dtype else model
    curve = Curve()
    model.train()
    for ids, targets in batches:
        with torch.autocast(device, dtype=dtype) if kind == "mixed" else contextlib.nullcontext():
            value = loss(forward(ids.to(device)).float(), targets.to(device))
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        curve.losses.append(value.item())
        curve.norms.append(norm.item())
    curve.weights = {name: weight.detach().float().cpu() for name, weight in model.state_dict().items()}
    return curve


def _with_copies(model: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def forward(ids: Tensor) -> Tensor:
        copies = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
        output: Tensor = torch.func.functional_call(model, copies, (ids,))
        return output

    return forward


def _in_fp8(model: nn.Module) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_inner(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name != "head"

    config = Float8LinearConfig(pad_inner_dim=True)
    converted: nn.Module = convert_to_float8_training(model, config=config, module_filter_fn=is_inner)
    return converted
