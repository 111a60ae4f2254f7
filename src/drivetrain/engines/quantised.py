"""torchao's quantised moments as plain tensors of the whole parameter, by name: what a checkpoint holds of them.

A moment is the codes of its numbers, a scale for each block of them and the table that codes point into. Saved as they
are, and not as the numbers they stand for, because quantising those again gives other scales: the table reaches 1 but
not -1, so a block whose largest number is negative shrinks a little each time.

Of a sharded moment each scale is repeated for all numbers of its block, so that it is gathered and cut as the parameter
itself is; then one a block is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from drivetrain.low_bit import fill_blocks, shard_sizes

KIND = "quantised"  # the key that marks a moment's parts
MODULES = {"OptimState8bit": "subclass_8bit", "OptimState4bit": "subclass_4bit", "OptimStateFp8": "subclass_fp8"}
TABLE = "qmap"  # the same for all numbers


@torch.no_grad()
def held(tensor: Tensor) -> list[Tensor]:
    """What occupies memory: the parts of a quantised moment, else the tensor itself."""
    local: Any = _local(tensor)
    return [getattr(local, name) for name in local.tensor_attrs] if is_quantised(tensor) else [tensor]


@torch.no_grad()
def is_quantised(tensor: Tensor) -> bool:
    return type(_local(tensor)).__name__ in MODULES


def are_parts(value: Any) -> bool:
    return isinstance(value, dict) and KIND in value


@torch.no_grad()
def parts(moment: Tensor, gather: Callable[[Tensor], Tensor | None]) -> dict[str, Any] | None:
    """The moment's parts, each whole; None where `gather` keeps nothing."""
    local: Any = _local(moment)
    names, context = local.__tensor_flatten__()
    found = {}
    for name in names:
        part = getattr(local, name)
        every = 1 if name == TABLE else local.numel() // part.numel()
        sharded = isinstance(moment, DTensor) and name != TABLE
        whole = gather(_as(_spread(part, every, local), moment) if sharded else part)
        found[name] = whole if whole is None or not sharded else _one_of(whole, every)
    if None in found.values():
        return None
    plain = [str(value) if isinstance(value, torch.dtype) else value for value in context]
    return {KIND: type(local).__name__, **found, "context": plain}


@torch.no_grad()
def joined(saved: dict[str, Any], parameter: Tensor, place: Callable[[Tensor], Tensor]) -> Tensor:
    """The reverse: the moment of this rank's part of the parameter. place: a whole tensor → sharded as the parameter.

    Where blocks do not fill the shards of this layout it comes as the numbers it stands for.
    """
    cls = getattr(import_module(f"torchao.optim.{MODULES[saved[KIND]]}"), saved[KIND])
    context = [_dtype(value) for value in saved["context"]]
    whole = cls.__tensor_unflatten__({name: saved[name] for name in cls.tensor_attrs}, context)
    if not isinstance(parameter, DTensor):
        return whole  # type: ignore[no-any-return]
    if not fill_blocks(shard_sizes(parameter), whole.block_size):
        return place(whole.dequantize(parameter.dtype))
    cut = {}
    for name in cls.tensor_attrs:
        part = saved[name]
        if name == TABLE:
            cut[name] = part.to(parameter.device)
        else:
            every = whole.numel() // part.numel()
            cut[name] = _one_of(_local(place(_spread(part, every, whole))), every)
    return _as(cls.__tensor_unflatten__(cut, context), parameter)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _spread(part: Tensor, every: int, like: Tensor) -> Tensor:
    """One entry for `every` numbers → one for each."""
    return part if every == 1 else part.repeat_interleave(every).view(like.shape)


def _one_of(spread: Tensor, every: int) -> Tensor:
    return spread if every == 1 else spread.flatten()[::every].clone()


def _as(local: Tensor, sharded: Any) -> Tensor:
    """A tensor of this rank as its shard of one that is sharded like another."""
    return DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def _dtype(value: Any) -> Any:
    return getattr(torch, value.removeprefix("torch.")) if isinstance(value, str) else value
