"""Records every storage of a traced run: when it is made and freed, how large it is, and what it serves.

From the record follow the peak, what is alive at it, and memory over time. A storage is a parameter, a buffer,
optimizer state or a gradient if the engine holds it as one; an activation if forward makes it and it outlives
forward; the engine's if a collective fills it or it is resized (FSDP's gathered parameters); otherwise temporary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.measure.memory import TensorPeak
from drivetrain.measure.observer import tensors_in
from drivetrain.plan.step_costs import StepMemory
from drivetrain.plan.timeline import MOST, PARTS, MemoryPart, Timeline

OUTSIDE = "between"  # the phase of what happens outside of the engine's timed parts
NO_STORAGE = -1  # of a moment at which nothing changes
REDUCE_SCATTERS = ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")  # outputs first, then inputs


@dataclass(frozen=True)
class Change:
    """One storage that was made, resized or freed."""

    storage: int  # a number that is never used again
    size: int  # bytes from now on; 0: freed
    phase: str
    step: int


class MemoryRecord(TensorPeak):
    """Records storages of fake tensors while active."""

    def __init__(self, granularity: int = 1, gloo: bool = False) -> None:
        """granularity: bytes that sizes are rounded up to, as an allocator does: 512 on CUDA, 1 on a CPU. gloo: whether
        the ranks exchange by gloo, which reduces and scatters in a copy of the whole tensor
        (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, reduce_scatter_tensor_coalesced)."""
        super().__init__()
        self._gloo = gloo
        self.changes: list[Change] = []
        self._granularity = granularity
        self._numbers: dict[int, int] = {}  # live storage → its number
        self._roles: dict[int, MemoryPart] = {}
        self._next = 0
        self._phase, self._step = OUTSIDE, 0
        self._forward: list[int] = []  # made in the present forward pass

    def begin_step(self) -> None:
        self._step += 1

    def updates(self) -> bool:
        """Returns whether the step is at the optimizer's update."""
        return self._phase == "optimizer"

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Surrounds a part of a step, as engines time them."""
        before = self._phase
        if self.changes and self.changes[-1].phase == name:  # two passes in a row are two stretches
            self.changes.append(Change(NO_STORAGE, 0, before, self._step))
        self._phase = name
        yield
        self._phase = before
        if name.startswith("forward"):
            alive = set(self._numbers.values())
            self._roles.update({number: "activations" for number in self._forward if number in alive})
            self._forward = []

    def serves(self, part: MemoryPart, tensors: Iterable[Tensor]) -> None:
        """Records what tensors are for; an earlier statement about the same storage is replaced."""
        for tensor in tensors:
            self._see(tensor)
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self._roles[number] = part

    def memory(self) -> StepMemory:
        """Returns the peak of the last step, without what an allocator holds beyond it."""
        return memory_of(self.timeline())

    def timeline(self) -> Timeline:
        """Returns what is alive after each change of the last step."""
        places = {part: place for place, part in enumerate(PARTS)}
        alive: dict[int, int] = {}
        before = 0  # changes of earlier steps
        phases: list[str] = []
        more = np.zeros((len(self.changes), len(PARTS)), dtype=np.int64)
        for number, change in enumerate(self.changes):
            place = places[self._roles.get(change.storage, "temporaries")]
            more[number, place] = change.size - alive.pop(change.storage, 0)
            if change.size:
                alive[change.storage] = change.size
            if change.step < self._step:
                before += 1
            else:
                phases.append(change.phase)
        return Timeline(tuple(phases), more.cumsum(axis=0)[before:])

    def _counts(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type in ("meta", "cpu")

    def _observe(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func._opname == "wait_tensor":  # which returns what it is given; without numbers it returns another tensor
            self._forget(args[0].untyped_storage()._cdata)
        super()._observe(func, args, kwargs, result)
        if self._gloo and func.namespace == "c10d" and func._opname in REDUCE_SCATTERS:
            self._copy(tensors_in(args[1]))
        if func.namespace == "c10d" and "allreduce" not in func._opname:
            for tensor in tensors_in((args, kwargs)):
                number = self._numbers.get(tensor.untyped_storage()._cdata)
                if number is not None:
                    self._roles.setdefault(number, "engine")

    def _copy(self, tensors: Iterable[Tensor]) -> None:
        """Records a storage of the size of these together, which is freed at once."""
        number, self._next = self._next, self._next + 1
        self._roles[number] = "engine"
        for size in (sum(tensor.nbytes for tensor in tensors), 0):
            self.changes.append(Change(number, size, self._phase, self._step))

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        super()._resized(storage, size)
        if (number := self._numbers.get(storage._cdata)) is not None:
            self._roles[number] = "engine"

    def _holds(self, key: int, size: int) -> None:
        size = math.ceil(size / self._granularity) * self._granularity
        if key not in self._numbers:
            self._numbers[key] = self._next
            if self._phase.startswith("forward"):
                self._forward.append(self._next)
            self._next += 1
        self.changes.append(Change(self._numbers[key], size, self._phase, self._step))
        super()._holds(key, size)

    def _forget(self, key: int) -> None:
        number = self._numbers.pop(key, None)
        if number is not None:
            self.changes.append(Change(number, 0, self._phase, self._step))
        super()._forget(key)


def memory_of(timeline: Timeline) -> StepMemory:
    """Returns the peak of a step."""
    parts = timeline.parts_at(timeline.peak)
    peak = sum(parts.values())
    return StepMemory(peak, peak, parts, timeline.thinned(MOST))
