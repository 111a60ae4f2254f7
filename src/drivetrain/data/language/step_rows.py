"""Reads rows whose answer is marked step by step: a prompt, a list of steps, and a label for each (TRL's layout)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.data.language.row_schema import RowError, RowSchema, kind, text, truth

COLUMNS = ("completions", "labels")


def marks_steps(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | None = None) -> bool:
    """Returns whether rows have a list of steps beside a list of labels."""
    names = [(columns or {}).get(name, name) for name in COLUMNS]
    return any(all(isinstance(row.get(name), list) for name in names) for row in rows)


def read_steps(row: Mapping[str, Any], form: RowSchema) -> tuple[tuple[str, bool], ...]:
    """Returns each step with whether it is right. Raises RowError with what is wrong with them."""
    names = [form.required[name] for name in COLUMNS]
    steps, labels = (row.get(name) for name in names)
    for name, given in zip(names, (steps, labels), strict=True):
        if not isinstance(given, list):
            raise RowError(f"{name} is missing" if given is None else f"{name} is {kind(given)}, not a list")
    assert isinstance(steps, list)
    assert isinstance(labels, list)
    if not steps:
        raise RowError(f"{names[0]} is empty")
    if len(steps) != len(labels):
        raise RowError(f"it has {len(steps)} steps and {len(labels)} labels")
    pairs = enumerate(zip(steps, labels, strict=True), start=1)
    return tuple((text(each, f"step {n}"), truth(label, f"the label of step {n}")) for n, (each, label) in pairs)
