"""The columns of a plan's table, for the screen and for the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drivetrain.plan.rows import Plan, Row, gib
from drivetrain.tracking.quantities import figures_text


@dataclass(frozen=True)
class Column:
    name: str
    explained: str
    text: Callable[[Plan, Row], str]


def columns(plan: Plan) -> list[Column]:
    """Returns the columns that a plan has figures for."""
    shown = [WAY, STEP, RATE, MEMORY, VERDICT]
    if plan.steps is not None:
        shown.insert(3, TOTAL)
    if plan.price is not None:
        shown.insert(4, COST)
    if any(row.host_bytes for row in plan.rows):
        shown.insert(len(shown) - 1, HOST)
    return shown


def _step(plan: Plan, row: Row) -> str:
    del plan
    return "" if row.seconds is None else f"{row.seconds:.3g} s"


def _rate(plan: Plan, row: Row) -> str:
    del plan
    if row.tokens_per_second is not None:
        return f"{row.tokens_per_second:,.0f} tokens"
    return "" if row.samples_per_second is None else f"{figures_text(row.samples_per_second)} samples"


def _memory(plan: Plan, row: Row) -> str:
    del plan
    if row.costs is None:
        return ""
    return f"{gib(row.costs.memory.allocated)} of {gib(row.capacity)}"


def _host(plan: Plan, row: Row) -> str:
    del plan
    if not row.host_bytes:
        return ""
    of = f" of {gib(row.host_capacity)}" if row.host_capacity is not None else ""
    return f"{gib(row.host_bytes)}{of}{', and disk' if row.run.engine.keeps_on_disk else ''}"


def _total(plan: Plan, row: Row) -> str:
    seconds = plan.total_seconds(row)
    return "" if seconds is None else duration(seconds)


def _cost(plan: Plan, row: Row) -> str:
    cost = plan.cost(row)
    if cost is None:
        return ""
    return f"{cost:,.{max(2, 1 - math.floor(math.log10(cost))) if cost else 2}f}"  # at least two significant digits


WAY = Column("way", "what to add to `drivetrain train run.yaml`", lambda _, row: words_of(row))
STEP = Column("planned step", "time of one step", _step)
RATE = Column("a second", "tokens, padding included, or samples over all devices", _rate)
TOTAL = Column("whole run", "all steps, without evaluations, saves and start", _total)
COST = Column("cost", "the whole run at the price of an hour of a device, for all devices of the machine", _cost)
MEMORY = Column("memory a device", "tensors at the peak of the fullest device, of what it has", _memory)
HOST = Column("host memory a node", "what the ranks of a node keep there, or on its disk, for their GPUs", _host)
VERDICT = Column("fits", "with a margin; or what is short, or why it is no way to run", lambda _, row: row.verdict)


def held_beside(plan: Plan) -> str:
    """Returns what a verdict counts beside the tensors of the memory column, without which a row that lacks memory
    looks as if it had some left; "" where no row has any."""
    memories = [row.costs.memory for row in plan.rows if row.costs is not None and row.costs.memory.allocated]
    if not memories:
        return ""
    shares = sorted({round(100 * (each.reserved / each.allocated - 1)) for each in memories})
    share = f"{shares[0]}%" if len(shares) == 1 else f"{shares[0]} to {shares[-1]}%"
    unseen = gib(max(row.unseen[1] for row in plan.rows))
    return (
        f"Memory is of tensors. Before it says whether they fit, the plan adds {share} of them, which the allocator "
        f"holds for the gaps between them, and {unseen} that no trace sees: at most what libraries and the device's "
        f"context take."
    )


def words_of(row: Row) -> str:
    """Returns the overrides that lead to a row's way."""
    return " ".join(row.overrides) or "as it is"


def duration(seconds: float) -> str:
    """Formats a time in its two largest units: "3 d 4 h", "12 min 5 s", "1.2 s"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    units: Sequence[tuple[str, int]] = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    place = next(n for n, (_, size) in enumerate(units) if seconds >= size)
    (large, size), (small, part) = units[place], units[place + 1]
    whole = int(seconds // size)
    return f"{whole:,} {large} {int((seconds - whole * size) // part)} {small}"


def shown_rows(plan: Plan, most_fitting: int = 12, most_others: int = 12) -> tuple[list[Row], int]:
    """Returns the rows for a reader, and how many are left out: all of a few; of many the best micro-batch of each way
    that fits, and the best row of each engine that has none of these."""
    if len(plan.rows) <= most_fitting + most_others:
        return [*plan.rows], 0
    shown: list[Row] = []
    seen: set[str] = set()
    engines: set[str] = set()
    for row in plan.rows:
        run = row.run
        way = f"{run.engine!r} {run.precision} {run.world_size} {run.recompute} {run.offload_activations}"
        fits = row.fits == "yes" and way not in seen and len(seen) < most_fitting
        if fits or row is plan.choice or (repr(run.engine) not in engines and len(shown) < most_fitting + most_others):
            shown.append(row)
            seen.add(way)
            engines.add(repr(run.engine))
    return shown, len(plan.rows) - len(shown)
