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
        if name == TABLE or not isinstance(moment, DTensor):
            found[name] = gather(part)
        else:
            every = local.numel() // part.numel()
            whole = gather(_as(_spread(part, every, local), moment))
            found[name] = None if whole is None else _one_of(whole, every).view(part.dtype)
    if any(part is None for part in found.values()):
        return None
    signs = [value for value in context if isinstance(value, bool)]  # beside shape and dtype, which parameters have
    return {KIND: type(local).__name__, **found, "signed": signs}


@torch.no_grad()
def joined(saved: dict[str, Any], parameter: Tensor, place: Callable[[Tensor], Tensor]) -> Tensor:
    """The reverse: the moment of this rank's part of the parameter. place: a whole tensor → sharded as the parameter.

    Where blocks do not fill the shards of this layout it comes as the numbers it stands for.
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


def _made(cls: Any, tensors: dict[str, Tensor], signed: list[bool], like: Tensor) -> Any:
    shape = [like.shape] if cls.__name__ == "OptimState4bit" else []  # whose codes are packed
    return cls.__tensor_unflatten__(tensors, [*signed, *shape, torch.float32])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _spread(part: Tensor, every: int, like: Tensor) -> Tensor:
    """One entry for `every` numbers → one for each; bytes where they are bytes, which travel in any case."""
    part = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
    return part if every == 1 else part.repeat_interleave(every).view(like.shape)


def _one_of(spread: Tensor, every: int) -> Tensor:
    return spread if every == 1 else spread.flatten()[::every].clone()


def _as(local: Tensor, sharded: Any) -> Tensor:
    """A tensor of this rank as its shard of one that is sharded like another."""
    return DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )
