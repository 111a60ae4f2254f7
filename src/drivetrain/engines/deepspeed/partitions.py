"""What ZeRO has cut up, whole again and by name: DeepSpeed's partitions as this project's state.

Functions that give whole tensors are called by all ranks alike; a parameter is gathered at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from drivetrain.distributed.shard import Shard


def is_sharded(parameter: Tensor) -> bool:
    """Stage 3 leaves an empty tensor, with the shape and the shard beside it."""
    return hasattr(parameter, "ds_id")


def shape_of(parameter: Any) -> torch.Size:
    return torch.Size(parameter.ds_shape) if is_sharded(parameter) else parameter.shape


def shard(parameter: Any) -> Tensor:
    """Stage 3: this rank's piece, flat and padded."""
    piece = parameter.ds_tensor
    assert isinstance(piece, Tensor)
    return piece


def held(parameter: Any) -> Tensor:
    """This rank's part: the shard, or all of it where stage 3 keeps small parameters whole."""
    if not is_sharded(parameter):
        return parameter.detach()
    whole: Tensor = parameter.data
    return whole if parameter.ds_persist and whole.numel() else shard(parameter)


def whole(parameter: Tensor) -> Tensor:
    """A weight or buffer; of a trained weight the master copy."""
    if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
        master = safe_get_full_fp32_param(parameter)
        if master is not None:
            return master
    if not is_sharded(parameter):
        return parameter.detach()
    with GatheredParameters([parameter]):
        return parameter.detach().clone()


def own(parameter: Tensor, rank: int) -> Tensor | Shard | None:
    """What this rank has of a weight or buffer; of a trained weight, of the master copy. None if it has nothing."""
    trained = isinstance(parameter, nn.Parameter) and parameter.requires_grad
    if trained and hasattr(parameter, "_hp_mapping"):
        return _fragment(parameter, None)
    if not is_sharded(parameter):
        return parameter.detach()
    master = safe_get_local_fp32_param(parameter) if trained and hasattr(parameter, "_z3_optimizer") else None
    return _stretch(shard(parameter) if master is None else master, parameter, rank)


def own_moment(parameter: Tensor, key: str, rank: int) -> Shard | None:
    if not is_sharded(parameter):
        return _fragment(parameter, key)
    return _stretch(safe_get_local_optimizer_state(parameter, key), parameter, rank)


def _fragment(parameter: Any, key: str | None) -> Shard | None:
    """Stages 1 and 2: the part of it that lies in this rank's partition, if any."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    return Shard(mapping.get_hp_fragment(key).flatten(), parameter.shape, (mapping.lp_fragment_address.start,))


def _stretch(local: Tensor, parameter: Tensor, rank: int) -> Shard:
    """Stage 3: without the padding. Copied where DeepSpeed's buffer is used again."""
    shape, size = shape_of(parameter), shard(parameter).numel()
    first = min(rank * size, shape.numel())
    return Shard(local.flatten()[: min(size, shape.numel() - first)].clone(), shape, (first,))


@torch.no_grad()
def fill(parameter: Tensor, value: Tensor, rank: int) -> None:
    """The reverse: the weight as it is used, and its master copy."""
    if not is_sharded(parameter):
        parameter.copy_(value)
        if isinstance(parameter, nn.Parameter) and hasattr(parameter, "_hp_mapping"):
            safe_set_full_fp32_param(parameter, value.to(parameter.device, torch.float32))
        return
    with GatheredParameters([parameter], modifier_rank=0):
        if rank == 0:
            parameter.copy_(value)
    if parameter.requires_grad and hasattr(parameter, "_z3_optimizer"):
        safe_set_local_fp32_param(parameter, _shard(value, parameter, rank))


def gradient(parameter: Tensor) -> Tensor:
    found = safe_get_full_grad(parameter)
    assert isinstance(found, Tensor), "asked between the window and its step"
    return found


def link_moments(parameters: Sequence[Any], flat: Tensor, state: Mapping[str, Any]) -> None:
    """Stages 1 and 2: DeepSpeed 0.19 links the moments after the first group's first step, and so the first group's."""
    for parameter in parameters:
        if getattr(parameter, "_hp_mapping", None) is not None:
            parameter._hp_mapping.set_optim_state_fragment(flat, state)


def set_moment(parameter: Tensor, key: str, value: Tensor, rank: int) -> None:
    if is_sharded(parameter):
        safe_set_local_optimizer_state(parameter, _shard(value, parameter, rank), key)
    else:
        safe_set_full_optimizer_state(parameter, value.to(parameter.device, torch.float32), key)


def _shard(value: Tensor, parameter: Any, rank: int) -> Tensor:
    """This rank's piece of a flat tensor, padded with zeros as stage 3 pads (it cannot set uneven ones whole)."""
    size = parameter.ds_tensor.numel()
    piece = value.flatten()[rank * size : (rank + 1) * size].to(parameter.ds_tensor.device, torch.float32)
    return nn.functional.pad(piece, (0, size - piece.numel()))


def num_masters(optimizer: Any) -> int:
    """How many elements those are, also of what lies on a disk."""
    counts = getattr(optimizer, "fp16_partitioned_groups_flat_numel", None)
    return sum(counts) if counts is not None else sum(master.numel() for master in masters(optimizer))


def masters(optimizer: Any) -> list[Tensor]:
    """The flat fp32 partitions that this rank updates (each kind of ZeRO optimizer names them otherwise)."""
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return []


def held_bytes(model: nn.Module, zero: Any, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Master weights count as optimizer state; DeepSpeed does not tell of the gradients' buffers."""
    found = {"frozen": 0, "trained": 0}
    for parameter in model.parameters():
        found["trained" if parameter.requires_grad else "frozen"] += held(parameter).nbytes
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return {**found, "optimizer": sum(tensor.nbytes for tensor in [*masters(zero), *states])}
