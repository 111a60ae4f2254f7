"""Writes the values of a table's column as texts: numbers as a reader would, whatever type a block of them has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_MISSING = ("NaTType", "NAType")  # pandas' own


def is_missing(value: Any) -> bool:
    """Returns whether a cell has no value."""
    return value is None or (isinstance(value, float) and value != value) or type(value).__name__ in _MISSING


def kinds_of(values: Sequence[Any]) -> set[str]:
    """Returns the kinds among a block's values: text, int, whole or broken floats, missing."""
    types = set(map(type, values))
    if types == {str}:
        return {"text"}
    found = {"missing"} if any(map(is_missing, values)) else set()
    for each in types:
        if each is float:
            numbers = [value for value in values if type(value) is float and not is_missing(value)]
            broken = any(not value.is_integer() for value in numbers)
            found |= {"float", "broken"} if broken else {"float"} if numbers else set()
        elif each is int:
            found.add("int")
        elif each is not type(None) and each.__name__ not in _MISSING:
            found.add("text")
    return found


def style_of(kinds: set[str]) -> str:
    """Returns how numbers are written: whole ones without a point, unless others of their column have digits behind
    it."""
    if "text" in kinds or "float" not in kinds:
        return "plain"
    return "float" if "broken" in kinds else "whole"


def as_texts(values: Sequence[Any], style: str) -> list[str]:
    """Returns the values as texts, numbers in that style; missing ones are empty."""
    if style == "plain":
        return [value if type(value) is str else "" if is_missing(value) else str(value) for value in values]
    return ["" if is_missing(value) else _number(float(value), style) for value in values]


def _number(value: float, style: str) -> str:
    return str(int(value)) if style == "whole" and math.isfinite(value) else str(value)
