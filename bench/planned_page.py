"""The page of bench/planned.py: each row's errors, their medians and worst, and what misses the goals."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tables import machine_line, markdown_table

DISTURBED = 0.05  # cores that other programs took; more, and a time says nothing
SMALL, NEAR = 64 * 2**20, 2 * 2**20  # a peak below the first may be off by the second
INTRODUCTION = f"""Made by `python bench/planned.py`. A row is a way to run a recipe: its plan, and real steps of its
engine, in a new process a rank.

- The peak of tensors is that of the fullest rank in a step. Of recipes whose step takes a minute on a processor,
  smaller steps are planned and measured (`SHORTER` in bench/planned.py).
- Resident memory counts above that before the model is built, when all is imported and the data are read. Its planned
  value is what the allocator holds for the tensors, gaps between them included, and what libraries take once they are
  used, as `drivetrain calibrate` measured it.
- The time of a step is the median of those of a second or so (nine at least, three where they are long), without
  loading data; the plan's is from `drivetrain calibrate`. It is compared only where ranks do not exceed cores, other
  programs took at most {DISTURBED:.0%} of a core and more than one step was timed; of the others the planned time
  stands beside the processor time of the rank that used most, over all its threads.
- Three figures of the plan were fitted to this table, so that it is no proof of them: what the allocator holds for the
  tensors, what ranks on one CPU wait for one another, and what an engine's program takes at each message. Peaks of
  tensors, and everything of one process' time, are not fitted."""
HEAD = [
    "recipe, engine, ranks",
    "tensors planned",
    "measured",
    "error",
    "resident above the imports",
    "error",
    "step planned",
    "measured",
    "error",
    "processor time",
]


@dataclass(frozen=True)
class Goal:
    what: str
    median: float
    worst: float | None


GOALS = {
    "tensor": Goal("peak of tensors", 0.01, 0.03),
    "resident": Goal("resident memory above the imports", 0.10, None),
    "seconds": Goal("time of a step", 0.15, 0.40),
}


def is_disturbed(row: dict[str, Any]) -> bool:
    found = row["measured"]
    return bool(found.get("foreign_cores", 0.0) > DISTURBED or found.get("steps", 9) == 1)


def figures(row: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Returns (planned, measured) of what counts in a row: bytes, and seconds of a step."""
    planned, measured = row["planned"], row["measured"]
    found: dict[str, tuple[float, float]] = {}
    if planned.get("tensor") and measured.get("tensor"):
        found["tensor"] = planned["tensor"], measured["tensor"]
    if planned.get("resident") and measured.get("resident"):
        found["resident"] = planned["resident"], measured["resident"]
    both = planned.get("seconds"), measured.get("seconds")
    if all(both) and row["ranks"] <= (os.cpu_count() or 1) and not is_disturbed(row):
        found["seconds"] = both
    return found


def error_of(what: str, planned: float, measured: float) -> float:
    """Returns the relative error; 0 where a small peak is near enough in bytes."""
    if what == "tensor" and measured < SMALL and abs(planned - measured) <= NEAR:
        return 0.0
    return planned / measured - 1


def misses(row: dict[str, Any]) -> list[str]:
    """Returns what of a row is beyond the goals' worst."""
    found = []
    for what, (planned, measured) in figures(row).items():
        worst = GOALS[what].worst
        if worst is not None and abs(error_of(what, planned, measured)) > worst:
            found.append(f"{GOALS[what].what} {planned / measured - 1:+.0%}")
    return found


def page(rows: Sequence[dict[str, Any]]) -> str:
    ran = [row for row in rows if figures(row)]
    other = [row for row in rows if not figures(row)]
    missed = [f"- {name(row)}: {', '.join(misses(row))}" for row in ran if misses(row)]
    parts = [
        "# Planned and measured: the recipes on this machine",
        INTRODUCTION,
        machine_line(),
        markdown_table(["", "rows", "median error", "worst", "goal"], [line(what, ran) for what in GOALS]),
        markdown_table(HEAD, [cells(row) for row in ran]),
    ]
    if missed:
        parts.append("Beyond the goals:\n\n" + "\n".join(missed))
    if other:
        parts.append("Not compared:\n\n" + "\n".join(f"- {name(row)}: {reason(row)}" for row in other))
    return "\n\n".join(parts) + "\n"


def name(row: dict[str, Any]) -> str:
    return f"{row['recipe']} {row['engine']} {row['ranks']}"


def line(what: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    goal = GOALS[what]
    errors = [abs(error_of(what, *figures(row)[what])) for row in rows if what in figures(row)]
    asked = f"median {goal.median:.0%}" + ("" if goal.worst is None else f", worst {goal.worst:.0%}")
    if not errors:
        return [goal.what, "0", "-", "-", asked]
    median, worst = statistics.median(errors), max(errors)
    reached = median <= goal.median and (goal.worst is None or worst <= goal.worst)
    return [
        goal.what,
        str(len(errors)),
        f"{median:.1%}",
        f"{worst:.1%}",
        asked + (": reached" if reached else ": missed"),
    ]


def cells(row: dict[str, Any]) -> list[str]:
    found = figures(row)
    return [
        name(row),
        *compared(found.get("tensor"), mebibytes),
        *compared(found.get("resident"), mebibytes)[1:],
        *times(row, found.get("seconds")),
    ]


def times(row: dict[str, Any], pair: tuple[float, float] | None) -> list[str]:
    """Returns the cells of a step's time. One that was disturbed has its planned value, and the processor time."""
    planned, used = row["planned"].get("seconds"), row["measured"].get("processor_seconds")
    cells = compared(pair, milliseconds)
    if pair is None and planned:
        cells[0] = milliseconds(planned)
    return [*cells, milliseconds(used) if used else "-"]


def compared(pair: tuple[float, float] | None, text: Any) -> list[str]:
    if pair is None:
        return ["-", "-", "-"]
    return [text(pair[0]), text(pair[1]), f"{pair[0] / pair[1] - 1:+.1%}"]


def mebibytes(size: float) -> str:
    return f"{size / 2**20:,.2f} MiB"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def reason(row: dict[str, Any]) -> str:
    planned, measured = row["planned"], row["measured"]
    told = planned.get("refused") or planned.get("failed") or measured.get("failed") or "nothing was measured"
    return " ".join(str(told).split())
