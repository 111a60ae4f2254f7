"""Overrides that a later one of the same command line makes void: the last one counts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from drivetrain.config.load import resolve_key
from drivetrain.config.location import without_secrets
from drivetrain.errors import UserError, clipped

MOST_SHOWN = 100  # characters of an override


def without_effect(overrides: Sequence[str]) -> list[str]:
    """Returns a sentence for each override in whose place another one comes, which is given after it and sets the same
    field or the block that the field stands in. Wrong overrides are for `load` to report."""
    given: list[tuple[tuple[str, ...], str]] = []
    for override in overrides:
        with suppress(UserError):
            given.append((tuple(resolve_key(override.partition("=")[0])), override))
    found = []
    for number, (path, override) in enumerate(given, 1):
        later = next((other for place, other in reversed(given[number:]) if path[: len(place)] == place), override)
        if later != override:
            found.append(f"{_shown(override)} has no effect: {_shown(later)}, given after it, counts")
    return found


def _shown(override: str) -> str:
    return clipped(without_secrets(override), MOST_SHOWN)
