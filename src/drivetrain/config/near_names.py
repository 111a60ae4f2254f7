"""Suggests the name that a misspelt one probably means, for the problem that reports it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def suggestion(given: str, names: Sequence[str]) -> str:
    """Returns the question "did you mean a, b or c?" after the names that begin so, or those that are one mistake off,
    or else the nearest; "" where none is near. Capital letters are no mistake."""
    spelt: dict[str, str] = {}
    for name in names:
        spelt.setdefault(name.lower(), name)
    typed = given.lower()
    found = [name for name in spelt if name.startswith(typed)] if typed else []
    if typed in spelt:
        found = [typed]
    if not found:
        near = difflib.get_close_matches(typed, spelt)
        found = [name for name in near if _is_one_mistake_off(typed, name)] or near[:1]
    listed = [spelt[name] for name in found]
    return f"did you mean {' or '.join(filter(None, [', '.join(listed[:-1]), listed[-1]]))}?" if listed else ""


def _is_one_mistake_off(typed: str, name: str) -> bool:
    """Returns whether one character more, less or another one, or two in the wrong order, are all that differs."""
    pairs = enumerate(zip(typed, name, strict=False))
    start = next((place for place, (one, other) in pairs if one != other), min(len(typed), len(name)))
    typed, name = typed[start:], name[start:]
    swapped = typed[:2] == name[1::-1] and typed[2:] == name[2:]
    return swapped or typed[1:] == name[1:] or typed[1:] == name or typed == name[1:]
