"""Counts unusable rows of a data set by reason, and refuses to leave out too many of them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain.config.bad_rows import MOST_DROPPED
from drivetrain.errors import Problem

MOST_REASONS = 5
PARTICULARS = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")  # of one row: its numbers and what stands in it


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, and why."""

    where: str
    why: str


def by_reason(bad: Sequence[BadRow]) -> list[str]:
    """Returns how many rows each reason costs, the most first, with the first of them: "7 because output is empty
    (first a.json row 3)". Reasons that differ only in numbers and quoted texts count as one."""
    groups: dict[str, list[BadRow]] = {}
    for row in bad:
        groups.setdefault(PARTICULARS.sub("", row.why), []).append(row)
    largest = sorted(groups.values(), key=len, reverse=True)
    reasons = [f"{len(rows):,} because {rows[0].why} (first {rows[0].where})" for rows in largest[:MOST_REASONS]]
    others = sum(map(len, largest[MOST_REASONS:]))
    return [*reasons, f"{others:,} for other reasons"] if others else reasons


def too_many(name: str, bad: Sequence[BadRow], rows: int, most: float, field: str) -> list[Problem]:
    """Returns a problem if more of the rows of data set `name` are unusable than may be left out."""
    if not exceeds(len(bad), rows, most):
        return []
    share = f", more than {100 * most:g} %" if most else ""
    why = f"{len(bad):,} of the {rows:,} rows of {name} cannot be used{share}"
    return [Problem(field, f"{why}: {'; '.join(by_reason(bad))}", f"correct them, or {allowance(len(bad), rows)}")]


def exceeds(bad: int, rows: int, most: float) -> bool:
    """Returns whether so many bad rows exceed the share `most`; a single one never does, unless none may be left
    out."""
    return bad > max(1, most * rows + 1e-9) if most else bad > 0  # 0.29 of 100 is 28.999999999999996


def allowance(bad: int, rows: int) -> str:
    """Returns the value for the run file that lets so many of the rows be left out."""
    if not exceeds(bad, rows, MOST_DROPPED):
        return "give workload.data.bad_rows=drop"
    return f"give workload.data.bad_rows={math.ceil(100 * bad / rows) / 100:g}, the largest share to leave out"
