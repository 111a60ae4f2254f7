"""Writes NaN and infinity in JSON, which has no such numbers.

They are written as null, so that a column of numbers stays one for any reader (jq, pandas, DuckDB), and the object's
last key states which they were: {"loss": null, "grad_norm": 2.5, "not_finite": {"loss": "nan"}}. Within objects and
lists it holds the way there: {"metrics": {"loss": null}, "not_finite": {"metrics": {"loss": "inf"}}}.
"""

from __future__ import annotations

import json
import math
from typing import Any

NOT_FINITE = "not_finite"


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the object with null for numbers that are not finite, and these numbers under "not_finite"."""
    lost = _lost(values)
    return {**_emptied(values), NOT_FINITE: lost} if lost else values


def restored(values: dict[str, Any]) -> dict[str, Any]:
    """Undoes `plain`: restores the numbers that are not finite."""
    lost = values.get(NOT_FINITE)
    if not isinstance(lost, dict):
        return values
    found: dict[str, Any] = _filled({key: value for key, value in values.items() if key != NOT_FINITE}, lost)
    return found


def dumps(values: dict[str, Any], indent: int | None = None) -> str:
    return json.dumps(plain(values), indent=indent, ensure_ascii=False, allow_nan=False)


def _lost(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isfinite(value) else repr(value)
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        return {str(key): lost for key, item in value.items() if (lost := _lost(item))}
    return None


def _emptied(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _emptied(item) for key, item in value.items()}
    return [_emptied(item) for item in value] if isinstance(value, list | tuple) else value


def _filled(value: Any, lost: Any) -> Any:
    """Restores one value. A path that does not match (the line was edited) is left unchanged."""
    if value is None and lost in ("nan", "inf", "-inf"):
        return float(lost)
    if isinstance(value, dict) and isinstance(lost, dict):
        return {key: _filled(item, lost.get(key)) for key, item in value.items()}
    if isinstance(value, list) and isinstance(lost, dict):
        return [_filled(item, lost.get(str(number))) for number, item in enumerate(value)]
    return value
