"""The events of torch.profiler as plain spans of time, and the arithmetic of intervals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PART, MODULE = "part: ", "module: "  # beginnings of the names under which our own spans are recorded
COLLECTIVES = ("c10d::", "_c10d_functional::")  # calls that wait for an exchange, or begin one
BOOKKEEPING = ("autograd::engine::", "torch::autograd::", *COLLECTIVES, PART, MODULE)
BACKWARD = 1  # torch's RecordScope::BACKWARD_FUNCTION
MICROSECOND = 1e-6
Interval = tuple[float, float]


@dataclass
class Span:
    """An operator, or a named range of the program. start, end: seconds. sequence: the number that joins an operator of
    the forward pass to its backward; -1 if there is none. device: whether a GPU executed it. is_async: whether it ran
    beside the thread that began it, as exchanges over gloo do. is_annotation: whether it is a range that the program
    named (record_function): on a GPU the time from its first kernel to its last. parent: the span that called it."""

    name: str
    start: float
    end: float
    sequence: int = -1
    is_backward: bool = False
    is_async: bool = False
    device: bool = False
    is_annotation: bool = False
    own_seconds: float = 0.0  # without what it called
    parent: Span | None = None

    @property
    def is_named(self) -> bool:
        """Whether it is a range that this project named, not an operator."""
        return self.name.startswith((PART, MODULE))

    @property
    def is_operator(self) -> bool:
        """Whether it computes on the processor: no named range, no exchange, no bookkeeping of autograd."""
        return "::" in self.name and not self.device and not self.is_async and not self.name.startswith(BOOKKEEPING)

    @property
    def is_exchange(self) -> bool:
        """Whether ranks exchange tensors in it."""
        return self.name.startswith(("gloo:", "nccl:", "ncclDevKernel", "ncclKernel"))

    def within(self) -> Iterator[Span]:
        """Yields the spans around it, the nearest first."""
        around = self.parent
        while around is not None:
            yield around
            around = around.parent


def spans_of(events: Iterable[Any]) -> list[Span]:
    """Returns spans of torch.profiler's FunctionEvents, in order of their beginning."""
    made: dict[int, Span] = {}
    events = sorted(events, key=lambda event: event.time_range.start)
    for event in events:
        on_device = event.device_type.name != "CPU"
        made[id(event)] = Span(
            event.name,
            event.time_range.start * MICROSECOND,
            event.time_range.end * MICROSECOND,
            event.sequence_nr if event.sequence_nr is not None else -1,
            event.scope == BACKWARD,
            event.is_async,
            on_device,
            bool(event.is_user_annotation),
            (event.self_device_time_total if on_device else event.self_cpu_time_total) * MICROSECOND,
        )
    for event in events:
        if event.cpu_parent is not None:
            made[id(event)].parent = made.get(id(event.cpu_parent))
    return list(made.values())


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns intervals that cover the same points, in order and apart from each other."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return found


def length(intervals: Sequence[Interval]) -> float:
    """Returns the seconds of intervals that are apart from each other."""
    return sum(end - start for start, end in intervals)


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Returns what two results of `union` have in common."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found
