"""Overrides that give one field more than once, of which only the last would count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drivetrain.config.load import resolve_key
from drivetrain.errors import Problem, UserError


def repeated_fields(overrides: Sequence[str]) -> Iterator[Problem]:
    """Yields a problem for each field that several overrides give, by its short name (lr) or its whole one
    (optimizer.lr). An override without a field is left to the reader of run files, which refuses it."""
    given: dict[tuple[str, ...], list[str]] = {}
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals:
            continue
        try:
            given.setdefault(tuple(resolve_key(key)), []).append(override)
        except UserError:
            continue
    for path, all_of_it in given.items():
        if len(all_of_it) > 1:
            why = f"it takes one value, and {len(all_of_it)} were given: {', '.join(all_of_it)}"
            yield Problem(".".join(path), why, "give one of them; drivetrain compare takes several: KEY=VALUE,VALUE")
