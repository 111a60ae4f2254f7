"""Counts what a traced step computes and sends: operations by kind and dtype, collectives by mesh axis."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.measure.flops import FlopCount, formula_of
from drivetrain.measure.observer import tensors_in
from drivetrain.measure.traffic import GIVEN, KINDS, group_of
from drivetrain.models.planned_device import times
from drivetrain.plan.step_costs import Collective, Messages, OperationKind, Operations

COPY = torch.ops.aten.copy_.default
COPIES = (COPY, torch.ops.aten._to_copy.default)
SIZE_CLASS = 2.0  # calls whose work differs by less than about this factor are counted together


@dataclass
class _Sum:
    calls: int = 0
    work: float = 0.0  # FLOPs of operations
    bytes: float = 0.0

    def add(self, work: float, moved: float) -> None:
        calls = times()
        self.calls, self.work, self.bytes = self.calls + calls, self.work + calls * work, self.bytes + calls * moved


class OperationRecord(FlopCount):
    def __init__(self, whole: str = "dp", updates: Callable[[], bool] = lambda: False, offloads: bool = False) -> None:
        """whole: the axis that the group of all ranks is. updates: whether the step is at the optimizer's update.
        offloads: whether tensors on the device meta are what the host of a GPU holds, and no stand-ins."""
        super().__init__()
        self._whole, self._updates, self._offloads = whole, updates, offloads
        self._operations: dict[tuple[OperationKind, str, int], _Sum] = {}
        self._messages: dict[tuple[str, str, int, int], _Sum] = {}

    def operations(self) -> tuple[Operations, ...]:
        return tuple(
            Operations(kind, dtype, found.calls, found.work, found.bytes)
            for (kind, dtype, _), found in sorted(self._operations.items())
        )

    def messages(self) -> tuple[Messages, ...]:
        return tuple(
            Messages(_COLLECTIVES[kind], axis, ranks, stride, found.calls, found.bytes)
            for (kind, axis, ranks, stride), found in sorted(self._messages.items())
        )

    def _observe(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._send(func, args, kwargs)
            return
        if func.namespace in ("prim", "prims") or _is_view(func):
            return
        given = [*tensors_in((args, kwargs))]
        made = [*tensors_in(result)]
        if any(t.is_meta for t in (*given, *made)):
            if self._offloads:
                self._on_host(func, given, made)
            return
        formula = formula_of(func)
        work = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))
        moved = float(sum(t.numel() * t.element_size() for t in (*given, *made)))
        if not moved:
            return
        first = next((t for t in (*made, *given) if t.is_floating_point()), None)
        self._add(_kind(func, formula is not None), first, work, moved)

    def _on_host(self, func: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Counts an operator on tensors that the host of a planned GPU holds (host_functions.py, memory/offload.py): a
        copy to the GPU or back, or work of the host's processor. What autograd saves, and shards that are gathered, are
        copied while the GPU computes; an update is waited for."""
        if func in COPIES:
            source, target = (given[-1], given[0]) if func is COPY else (given[0], made[0])
            if source.is_meta != target.is_meta:  # numbers of another type are converted before they travel
                self._add("update_copy" if self._updates() else "host", target, 0.0, float(target.nbytes))
                return
        if not func._opname.startswith(("empty", "new_empty")):
            moved = float(sum(t.nbytes for t in (*given, *made)))
            self._add("processor", next(iter((*made, *given))), 0.0, moved)

    def _add(self, kind: OperationKind, first: Tensor | None, work: float, moved: float) -> None:
        size = round(math.log(max(work, moved, 1.0), SIZE_CLASS))
        dtype = str(torch.int64 if first is None else first.dtype).removeprefix("torch.")
        self._operations.setdefault((kind, dtype, size), _Sum()).add(work, moved)

    def _send(self, func: Any, args: Any, kwargs: Any) -> None:
        names = [argument.name for argument in func._schema.arguments]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        operator = func._opname.replace("_", "")
        kind = next((kind for start, (kind, _) in KINDS.items() if operator.startswith(start)), None)
        if kind is None:
            return
        group = group_of(named)
        given = [tensor for name in GIVEN for tensor in tensors_in(named.get(name))]
        whole = float(sum(t.numel() * t.element_size() for t in given))
        if kind == "all_gather":
            whole *= group.size()  # the result, of which each rank gives a part
        if group.size() > 1:
            members = dist.get_process_group_ranks(group)
            key = (kind, _axis(group, self._whole), len(members), members[1] - members[0])
            self._messages.setdefault(key, _Sum()).add(0.0, whole)


_COLLECTIVES: dict[str, Collective] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
}


def _axis(group: dist.ProcessGroup, whole: str) -> str:
    """Returns the name of the mesh axis that the group is, as DeviceMesh describes it; it takes the group of all for an
    axis of as many ranks. Data and context ranks together are data ranks to the parameters that they share."""
    described = group.group_desc
    axis = described.removeprefix("mesh_") if described.startswith("mesh_") else whole
    return "dp" if axis == "data" else axis


@functools.cache
def _kind(func: Any, computes: bool) -> OperationKind:
    name = str(func)
    if not computes:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            return "random"
        return "optimizer" if name.startswith(("aten._foreach", "aten._fused")) else "memory"
    if "attention" in name or "attn" in name:
        return "attention"
    return "convolution" if "convolution" in name else "matmul"


@functools.cache
def _is_view(func: Any) -> bool:
    """Returns whether the operator only gives a tensor another shape: it returns an alias that it does not write to."""
    if not hasattr(func, "_schema"):
        return False
    aliases = [returned.alias_info for returned in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
