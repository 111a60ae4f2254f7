"""Converts torchao's quantised moments to plain tensors of the whole parameter, by name, for checkpoints.

A moment is the codes of its numbers, a scale for each block of them and the table that codes point into. Saved as they
are, and not as the numbers they stand for, because quantising those again gives other scales: the table reaches 1 but
not -1, so a block whose largest number is negative shrinks a little each time.

When a sharded moment is loaded, each scale is repeated for all numbers of its block, so that it is cut as the parameter
itself is; then one a block is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from drivetrain.distributed.shard import Shard, like
from drivetrain.errors import RunError
from drivetrain.optim.low_bit import fill_blocks, shard_sizes

KIND = "quantised"  # the key that marks a moment's parts
MODULES = {"OptimState8bit": "subclass_8bit", "OptimState4bit": "subclass_4bit", "OptimStateFp8": "subclass_fp8"}
TABLE = "qmap"  # the same for all numbers


@torch.no_grad()
def held(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that occupy memory: the parts of a quantised moment, else the tensor itself."""
    local: Any = _local(tensor)
    return [getattr(local, name) for name in local.tensor_attrs] if is_quantised(tensor) else [tensor]


@torch.no_grad()
def is_quantised(tensor: Tensor) -> bool:
    return type(_local(tensor)).__name__ in MODULES


def are_parts(value: Any) -> bool:
    return isinstance(value, dict) and KIND in value


@torch.no_grad()
def parts(moment: Tensor) -> dict[str, Any]:
    """Returns the moment's parts; for a sharded one this rank's pieces of them."""
    local: Any = _local(moment)
    names, context = local.__tensor_flatten__()
    found: dict[str, Tensor | Shard] = {}
    for name in names:
        part = getattr(local, name)
        shared = name == TABLE or not isinstance(moment, DTensor)
        found[name] = part if shared else _piece(part, cast(DTensor, moment))
    signs = [value for value in context if isinstance(value, bool)]  # beside shape and dtype, which parameters have
    return {KIND: type(local).__name__, **found, "signed": signs}


@torch.no_grad()
def joined(saved: dict[str, Any], parameter: Tensor, place: Callable[[Tensor], Tensor]) -> Tensor:
    """Reverses `parts`: returns the moment of this rank's part of the parameter. place: a whole tensor → sharded as the
    parameter.

    If blocks do not fill the shards of this layout, it is returned dequantised.
    """
    cls = getattr(import_module(f"torchao.optim.{MODULES[saved[KIND]]}"), saved[KIND])
    names = cls.tensor_attrs
    whole = _made(cls, {name: saved[name] for name in names}, saved["signed"], parameter)
    if not isinstance(parameter, DTensor):
        return whole
    if not fill_blocks(shard_sizes(parameter), whole.block_size):
        return place(whole.dequantize(parameter.dtype))
    shards = {TABLE: saved[TABLE].to(parameter.device)} if TABLE in names else {}
    for name in names:
        if name != TABLE:
            every = whole.numel() // saved[name].numel()
            shard = _local(place(_spread(saved[name], every, whole)))
            shards[name] = _one_of(shard, every).view(saved[name].dtype)
    return _as(_made(cls, shards, saved["signed"], _local(parameter)), parameter)


def _piece(part: Tensor, moment: DTensor) -> Shard:
    """Returns the place of a part: one entry stands for several neighbouring numbers, in a shard of whole rows."""
    within = cast(Shard, like(moment.to_local(), moment))
    if any(within.offset[1:]) or within.tensor.shape[1:] != moment.shape[1:]:
        raise RunError(f"a quantised moment of {tuple(moment.shape)} is cut within its rows")
    every = max(1, within.tensor.numel()) // max(1, part.numel())
    row = math.prod(moment.shape[1:])
    whole = moment.shape if every == 1 else torch.Size([moment.numel() // every])
    return Shard(part.flatten(), whole, (within.offset[0] * row // every,))


def _made(cls: Any, tensors: dict[str, Tensor], signed: list[bool], like: Tensor) -> Any:
    shape = [like.shape] if cls.__name__ == "OptimState4bit" else []  # whose codes are packed
    return cls.__tensor_unflatten__(tensors, [*signed, *shape, torch.float32])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _spread(part: Tensor, every: int, like: Tensor) -> Tensor:
    """Repeats one entry for `every` numbers → one for each; bytes stay bytes, which every backend sends."""
    part = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
    return part if every == 1 else part.repeat_interleave(every).view(like.shape)


def _one_of(spread: Tensor, every: int) -> Tensor:
    return spread if every == 1 else spread.flatten()[::every].clone()


def _as(local: Tensor, sharded: Any) -> Tensor:
    """Returns a tensor of this rank as its shard of one that is sharded like another."""
    return DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )
