"""Converts DeepSpeed's partitions to this project's state: whole tensors by name.

Functions that return whole tensors are called by all ranks alike; a parameter is gathered at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.utils import (
    groups,
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
from drivetrain.models.planned_device import PLANNED_DEVICE

T = TypeVar("T")


def forget_ended_groups() -> None:
    """Lets DeepSpeed make its groups anew in a process whose earlier ranks have parted, as after a notebook's first
    run: it keeps them for the life of the process. PyTorch has no public question whether a group still is."""
    if groups._WORLD_GROUP is not None and groups._WORLD_GROUP not in dist.distributed_c10d._world.pg_map:
        groups._WORLD_GROUP = comm.cdb = None


def ranks_agree() -> Callable[[], None]:
    """Prepares DeepSpeed for a group whose ranks are not there. Returns a function that ends this.

    Stage 3 takes its own lists for those of the first rank, with which it compares them: without numbers there is
    nothing to exchange. The groups that DeepSpeed keeps for the life of the process are put aside, since they are of
    other ranks. The device gets a name that is not its host's, which is "cpu" too where a GPU is planned for;
    only the host has pinned memory. The rules have judged the precision for the planned device, which may have one that
    the processor here lacks.
    """
    accelerator = get_accelerator()
    accelerator.device_name = accelerator.current_device_name = lambda *_: PLANNED_DEVICE
    accelerator.pin_memory = lambda tensor, *_, **__: tensor.to("cpu")
    accelerator.is_fp16_supported = accelerator.is_bf16_supported = lambda: True
    length, lists = zero_utils.assert_lst_len_same_as_other_ranks, zero_utils.get_lst_from_rank0
    world, backend = groups._WORLD_GROUP, comm.cdb
    zero_utils.assert_lst_len_same_as_other_ranks = lambda _: None
    zero_utils.get_lst_from_rank0 = lambda own: own
    groups._WORLD_GROUP = comm.cdb = None

    def end() -> None:
        del accelerator.device_name, accelerator.current_device_name, accelerator.pin_memory
        del accelerator.is_fp16_supported, accelerator.is_bf16_supported
        zero_utils.assert_lst_len_same_as_other_ranks, zero_utils.get_lst_from_rank0 = length, lists
        groups._WORLD_GROUP, comm.cdb = world, backend

    return end


def replaced_parts(traced: bool) -> Callable[[], None]:
    """Returns a function that puts back what DeepSpeed replaces in this process from now on: stage 3 puts a linear
    product in place of torch's that keeps no gathered weight. traced: the ranks are not there."""
    forget_ended_groups()
    linear, end = nn.functional.linear, ranks_agree() if traced else None

    def put_back() -> None:
        nn.functional.linear = linear
        if end is not None:
            end()

    return put_back


def is_sharded(parameter: Tensor) -> bool:
    """Returns whether a parameter is sharded: stage 3 leaves an empty tensor, with the shape and the shard beside
    it."""
    return hasattr(parameter, "ds_id")


def shape_of(parameter: Any) -> torch.Size:
    return torch.Size(parameter.ds_shape) if is_sharded(parameter) else parameter.shape


def shard(parameter: Any) -> Tensor:
    """Returns this rank's shard under stage 3, flat and padded."""
    piece = parameter.ds_tensor
    assert isinstance(piece, Tensor)
    return piece


def held(parameter: Any) -> Tensor:
    """Returns this rank's part: the shard, or all of it where stage 3 keeps small parameters whole."""
    if not is_sharded(parameter):
        return parameter.detach()
    whole: Tensor = parameter.data
    return whole if parameter.ds_persist and whole.numel() else shard(parameter)


def whole(parameter: Tensor) -> Tensor:
    """Returns a whole weight or buffer; for a trained weight the master copy."""
    if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
        master = safe_get_full_fp32_param(parameter)
        if master is not None:
            return master
    if not is_sharded(parameter):
        return parameter.detach()
    with GatheredParameters([parameter]):
        return parameter.detach().clone()


def own(parameter: Tensor, rank: int) -> Tensor | Shard | None:
    """Returns this rank's part of a weight or buffer; for a trained weight, of the master copy. None if it has
    nothing."""
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
    """Returns the part of a parameter that lies in this rank's partition, if any, under stages 1 and 2."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    return Shard(mapping.get_hp_fragment(key).flatten(), parameter.shape, (mapping.lp_fragment_address.start,))


def _stretch(local: Tensor, parameter: Tensor, rank: int) -> Shard:
    """Returns the shard without the padding, under stage 3. Copied if DeepSpeed's buffer is used again."""
    shape, size = shape_of(parameter), shard(parameter).numel()
    first = min(rank * size, shape.numel())
    return Shard(local.flatten()[: min(size, shape.numel() - first)].clone(), shape, (first,))


@torch.no_grad()
def fill(parameter: Tensor, value: Tensor, rank: int) -> None:
    """Fills the weight as it is used, and its master copy: the reverse of `whole`."""
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


@torch.no_grad()
def follow(model: nn.Module, leader: nn.Module, mixing: float) -> None:
    """Mixes a model's trained weights into another's of the same names, a parameter at a time, under stage 3."""
    own = dict(model.named_parameters())
    for name, parameter in leader.named_parameters():
        if parameter.requires_grad and name in own:
            mine = own[name]
            with GatheredParameters([parameter]):
                value = parameter.detach().clone()
            with GatheredParameters([mine], modifier_rank=0):
                mine.lerp_(value.to(mine.dtype), mixing)
    buffers = dict(leader.named_buffers())
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and name in buffers:
            buffer.lerp_(buffers[name].to(buffer.dtype), mixing)


def gradient(parameter: Tensor) -> Tensor:
    found = safe_get_full_grad(parameter)
    assert isinstance(found, Tensor), "asked between the window and its step"
    return found


def link_moments(parameters: Sequence[Any], flat: Tensor, state: Mapping[str, Any]) -> None:
    """Links the moments under stages 1 and 2: DeepSpeed 0.19 does so after the first group's first step, and only for
    that group."""
    for parameter in parameters:
        if getattr(parameter, "_hp_mapping", None) is not None:
            parameter._hp_mapping.set_optim_state_fragment(flat, state)


def set_moment(parameter: Tensor, key: str, value: Tensor, rank: int) -> None:
    if is_sharded(parameter):
        safe_set_local_optimizer_state(parameter, _shard(value, parameter, rank), key)
    else:
        safe_set_full_optimizer_state(parameter, value.to(parameter.device, torch.float32), key)


def _shard(value: Tensor, parameter: Any, rank: int) -> Tensor:
    """Returns this rank's shard of a flat tensor, padded with zeros as in stage 3 (which cannot set uneven ones
    whole)."""
    size = parameter.ds_tensor.numel()
    piece = value.flatten()[rank * size : (rank + 1) * size].to(parameter.ds_tensor.device, torch.float32)
    return nn.functional.pad(piece, (0, size - piece.numel()))


def num_masters(optimizer: Any) -> int:
    """Returns the number of elements of the masters, including those on a disk."""
    counts = getattr(optimizer, "fp16_partitioned_groups_flat_numel", None)
    return sum(counts) if counts is not None else sum(master.numel() for master in masters(optimizer))


def masters(optimizer: Any) -> list[Tensor]:
    """Returns the flat fp32 partitions that this rank updates (each kind of ZeRO optimizer has another name for
    them)."""
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return []


def share_masters(optimizer: Any) -> None:
    """Makes the master weights the shards themselves under stage 3 in fp32; DeepSpeed has made a second copy of them.

    DeepSpeed intends to do so itself, but compares a tensor's device with a string (0.19), which is never equal. A rank
    holds 4 bytes less for each of its weights; the step's copy of masters into shards finds them equal.
    """
    shards = getattr(optimizer, "fp16_partitioned_groups_flat", ())
    for master, flat in zip(masters(optimizer), shards, strict=False):
        kinds = [(each.dtype, each.device, each.shape) for each in (master, flat) if each is not None]
        if len(kinds) == 2 and kinds[0] == kinds[1]:
            master.data = flat.detach()


def masters_apart(optimizer: Any) -> list[Tensor]:
    """Returns the masters that are no shards at the same time."""
    shards = getattr(optimizer, "fp16_partitioned_groups_flat", ())
    places = {flat.data_ptr() for flat in shards if flat is not None}
    return [master for master in masters(optimizer) if not master.numel() or master.data_ptr() not in places]


def gradient_buffers(optimizer: Any) -> list[Tensor]:
    """Returns the flat buffers in which stage 3 keeps gradients between steps: its shards, and a bucket of each
    dtype."""
    buckets = getattr(optimizer, "ipg_buckets", {}) if hasattr(optimizer, "grad_partitions_flat_buffer") else {}
    found = [getattr(optimizer, "grad_partitions_flat_buffer", None), *(each.buffer for each in buckets.values())]
    return [each for each in found if each is not None]


def held_bytes(model: nn.Module, zero: Any, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Counts master weights beside the shards as optimizer state, and no buffers of gradients."""
    found = {"frozen": 0, "trained": 0}
    for parameter in model.parameters():
        found["trained" if parameter.requires_grad else "frozen"] += held(parameter).nbytes
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return {**found, "optimizer": sum(tensor.nbytes for tensor in [*masters_apart(zero), *states])}


def present(held: Mapping[str, T | None]) -> dict[str, T]:
    """Returns the tensors that this rank has; the rest lies in others' partitions."""
    return {name: value for name, value in held.items() if value is not None}


def kinds(flat: Any, state: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Divides a partition's state into the names of its moments, and values shared by all parameters."""
    moments = [key for key, value in state.items() if isinstance(value, Tensor) and value.shape == flat.shape]
    return moments, {key: value for key, value in state.items() if key not in moments and value is not None}
