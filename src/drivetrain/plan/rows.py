"""The rows of a plan: a way to run each, with what it takes, or the reason why it cannot be; and the choice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from drivetrain.config.run import RunConfig
from drivetrain.plan.estimator import Estimator, Timing
from drivetrain.plan.overrides import overrides_of
from drivetrain.plan.step_costs import StepCosts

MARGIN = 0.05  # of a device's memory that a chosen run leaves free: longer samples, fragments
ALIKE = 0.01  # step times that differ by less are equal: the simpler way is chosen
PAYS = 0.1  # a precision that rounds more is chosen where it saves more than this: about what planned times err by
Fits = Literal["yes", "tight", "no"]
WORDS = {"optimizer": "optimizer state", "engine": "the engine's buffers", "temporaries": "temporaries"}


@dataclass(frozen=True)
class Row:
    """costs, timing: None for a way that was refused or not examined; reason has why. at_best: the least seconds of a
    step, of a way that was not examined because that is too slow."""

    run: RunConfig
    overrides: tuple[str, ...]
    costs: StepCosts | None = None
    timing: Timing | None = None
    capacity: int = 0  # bytes of a rank
    unseen: tuple[int, int] = (0, 0)  # least and most bytes beside the tensors
    reason: str | None = None
    at_best: float | None = None
    rank: tuple[int, ...] = ()  # the simpler of two ways has the lower one
    is_emulated: bool = False
    steps: int | None = None  # of this way's whole run, where they differ from row to row
    host_capacity: int | None = None  # bytes of a node's host; None: not known

    @property
    def seconds(self) -> float | None:
        return None if self.timing is None else self.timing.seconds

    @property
    def needed(self) -> int | None:
        """The bytes that a rank takes at the most."""
        return None if self.costs is None else self.costs.memory.reserved + self.unseen[1]

    @property
    def room(self) -> float:
        """The bytes that a rank has for tensors, without the margin and the most that no trace sees."""
        return self.capacity * (1 - MARGIN) - self.unseen[1]

    @property
    def host_bytes(self) -> int:
        """The bytes that the ranks of a node keep in its host's memory, or on its disk, for their GPUs."""
        return 0 if self.costs is None else self.costs.memory.host * (self.run.world_size // self.run.nodes)

    @property
    def lacks(self) -> int:
        """The bytes that a device is short of, or else its host; not above 0 where memory is enough."""
        assert self.needed is not None
        lack = self.needed - self.capacity
        return lack if lack > 0 or self.host_capacity is None else max(lack, self.host_bytes - self.host_capacity)

    @property
    def fits(self) -> Fits | None:
        """Whether memory is enough: yes, leaving MARGIN free; tight, leaving less; or no. None: not known."""
        if self.needed is None:
            return None
        if self.lacks > 0:
            return "no"
        is_enough = self.needed <= self.capacity * (1 - MARGIN)
        host = self.host_capacity is None or self.host_bytes <= self.host_capacity * (1 - MARGIN)
        return "yes" if is_enough and host else "tight"

    @property
    def largest(self) -> str | None:
        """The part of memory that takes most, in words."""
        if self.costs is None or not self.costs.memory.parts:
            return None
        name = max(self.costs.memory.parts, key=lambda part: self.costs.memory.parts[part])  # type: ignore[union-attr]
        return WORDS.get(name, name)

    @property
    def verdict(self) -> str:
        """Whether the row fits, or by how much it is short and of what, or why it is no way to run."""
        if self.reason is not None:
            return self.reason
        if self.needed is None:
            return "not examined"
        if self.fits == "no" and self.needed <= self.capacity:
            return f"short of {gib(self.lacks)} of the host's memory"
        if self.fits == "no":
            return f"short of {gib(self.lacks)}, most of it {self.largest}"
        if self.needed > self.capacity * (1 - MARGIN):
            return f"fits with {gib(self.capacity - self.needed)} free, less than {MARGIN:.0%}"
        if self.fits == "tight":
            return f"fits with {gib(-self.lacks)} of the host's memory free, less than {MARGIN:.0%}"
        return "fits; its time is not known: that of its disk" if self.run.engine.keeps_on_disk else "fits"

    @property
    def tokens_per_second(self) -> float | None:
        if self.costs is None or self.costs.tokens is None or not self.seconds:
            return None
        return self.costs.tokens / self.seconds

    @property
    def samples_per_second(self) -> float | None:
        return self.run.global_batch / self.seconds if self.seconds else None


@dataclass(frozen=True)
class Plan:
    """rows: those that fit by their step time, then the others. base: one process's step of one sample at a time, which
    the questions are about."""

    machine: str
    devices: int
    rows: tuple[Row, ...]
    choice: Row | None
    base: StepCosts | None = None
    room: float = 0.0  # bytes for tensors of one process, without the margin and what no trace sees
    notes: tuple[str, ...] = ()
    offers: tuple[str, ...] = ()  # ways that change the result, or that need another machine
    steps: int | None = None  # of the whole run, for rows that have none of their own
    price: float | None = None  # of a device and hour
    traces: int = 0
    seconds: float = field(default=0.0, compare=False)  # that planning took

    def total_seconds(self, row: Row) -> float | None:
        steps = self.steps if row.steps is None else row.steps
        return None if steps is None or row.seconds is None else steps * row.seconds

    def cost(self, row: Row) -> float | None:
        """Returns the price of the whole run, without evaluations and saves; every device of the machine is paid."""
        total = self.total_seconds(row)
        return None if total is None or self.price is None else total / 3600 * self.price * self.devices

    def as_object(self) -> dict[str, Any]:
        """Returns the plan as `--json` prints it. All figures are planned, none measured."""
        return {
            "machine": self.machine,
            "planned": True,
            "rows": [self._row(row) for row in self.rows],
            "choice": None if self.choice is None else self._row(self.choice),
            "notes": list(self.notes),
            "offers": list(self.offers),
            "traces": self.traces,
            "seconds": self.seconds,
        }

    def _row(self, row: Row) -> dict[str, Any]:
        memory = None if row.costs is None else row.costs.memory
        return {
            "engine": row.run.engine.label,
            "precision": row.run.precision,
            "processes": row.run.processes,
            "nodes": row.run.nodes,
            "micro_batch_size": row.run.micro_batch_limit,
            "recompute": row.run.recompute,
            "offload_activations": row.run.offload_activations,
            "overrides": list(row.overrides),
            "fits": row.fits,
            "reason": None if row.verdict == "fits" else row.verdict,
            "origin": None if row.costs is None else row.costs.origin,
            "allocated_bytes": memory and memory.allocated,
            "reserved_bytes": memory and memory.reserved,
            "unseen_bytes": list(row.unseen),
            "capacity_bytes": row.capacity,
            "memory": None if memory is None else dict(memory.parts),
            "host_bytes": row.host_bytes,
            "host_capacity_bytes": row.host_capacity,
            "step_seconds": row.seconds,
            "bound_by": None if row.timing is None else row.timing.bound_by,
            "total_seconds": self.total_seconds(row),
            "samples_per_second": row.samples_per_second,
            "tokens_per_second": row.tokens_per_second,
            "cost": self.cost(row),
        }


def row(run: RunConfig, base: RunConfig, costs: StepCosts, estimator: Estimator, rank: tuple[int, ...] = ()) -> Row:
    """Returns the row of a run whose costs are known. base: the user's run, from which the overrides lead to it."""
    is_timed = estimator.no_speed is None and not run.engine.keeps_on_disk
    timing = estimator.time(run, costs) if is_timed else None
    overrides, unseen = overrides_of(run, base), estimator.unseen(run)
    emulated = run.engine.is_emulated(estimator.host.device)
    # the figure does not say what a disk takes of it, and what its host
    host = None if not costs.memory.host or run.engine.keeps_on_disk else estimator.host_memory
    found = Row(run, overrides, costs, timing, estimator.capacity(run), unseen, rank=rank, is_emulated=emulated)
    return replace(found, host_capacity=host)


def refused(run: RunConfig, base: RunConfig, reason: str, rank: tuple[int, ...] = ()) -> Row:
    return Row(run, overrides_of(run, base), reason=reason, rank=rank)


def room_for_tensors(run: RunConfig, estimator: Estimator) -> float:
    """Returns the bytes that a rank has for tensors, without the margin and the most that no trace sees."""
    return estimator.capacity(run) * (1 - MARGIN) - estimator.unseen(run)[1]


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Returns what fits by its step time, then what is tight, then what does not fit by how much it lacks, then what is
    not known."""

    def key(each: Row) -> tuple[float, float]:
        if each.fits is None:
            return (3, each.at_best if each.at_best is not None else float("inf"))
        if each.fits == "no":
            return (2, each.lacks)
        return (0 if each.fits == "yes" else 1, float("inf") if each.seconds is None else each.seconds)

    return sorted(rows, key=lambda each: (*key(each), each.rank))


def chosen(rows: Sequence[Row]) -> Row | None:
    """Returns the quickest way that fits with a margin, without those whose precision rounds more for little; of those
    that are as quick the simplest. An engine that is emulated on this kind of device is never chosen."""
    fitting = [each for each in rows if each.fits == "yes" and not each.is_emulated and each.seconds is not None]
    fitting = [*_worth_their_rounding(fitting)]
    quickest = min((each.seconds or 0.0 for each in fitting), default=0.0)
    alike = [each for each in fitting if (each.seconds or 0.0) <= quickest * (1 + ALIKE)]
    return min(alike, key=lambda each: (each.rank, each.seconds or 0.0), default=None)


def _worth_their_rounding(rows: Sequence[Row]) -> Iterator[Row]:
    """Yields the rows beside which none that rounds less is about as quick."""
    least: dict[int, float] = {}  # seconds by significant bits
    for each in rows:
        bits = significant_bits(each.run)
        least[bits] = min(each.seconds or 0.0, least.get(bits, float("inf")))
    for each in rows:
        wider = (seconds for bits, seconds in least.items() if bits > significant_bits(each.run))
        if not any(seconds <= (each.seconds or 0.0) * (1 + PAYS) for seconds in wider):
            yield each


def significant_bits(run: RunConfig) -> int:
    return run.precision_spec.significant_bits


def gib(size: float) -> str:
    """Formats bytes in GiB, and below one in MiB."""
    return f"{size / 2**30:,.1f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:,.1f} MiB"
