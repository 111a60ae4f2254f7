"""Recognises rows that hold preferences: pairs of answers, or answers labelled as ones to learn from or to avoid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from drivetrain.data.language.row_schema import KTO_TAGS, PREFERENCE, marks_to_avoid
from drivetrain.data.language.scored_rows import scored_schema
from drivetrain.errors import Problem

Preferences = Literal["pairs", "labelled"]
# what rows hold → what they are, and the stages that learn from them
DESCRIBED = {
    "pairs": "its rows are pairs of a chosen and a rejected answer",
    "labelled": "its rows label each answer as one to learn from or to avoid",
}
STAGES = {
    "pairs": "workload.stage: dpo, which prefers the chosen answer (or orpo, simpo, cpo; reward trains a model that "
    "scores answers)",
    "labelled": "workload.stage: kto, which learns from both",
}


def preferences_in(rows: Sequence[Mapping[str, Any]]) -> Preferences | None:
    """Returns the kind of preferences that the rows hold, if any. Labels are true and false, of which one at least is
    false; 0 and 1 may be classes, which stage kto reads as labels all the same."""
    if any(all(row.get(name) for name in PREFERENCE) for row in rows) or scored_schema(rows, {}) is not None:
        return "pairs"
    return "labelled" if label_column(rows) is not None else None


def label_column(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the column that marks an answer of some row as one to avoid."""
    return next((name for name in KTO_TAGS if any(marks_to_avoid(row.get(name)) for row in rows)), None)


def preference_problem(name: str, preferences: Preferences, field: str) -> Problem:
    """Returns the problem of a data set of preferences where one reply a row is learned."""
    return Problem(field, f"{name}: {DESCRIBED[preferences]}, not single replies", f"give {STAGES[preferences]}")
