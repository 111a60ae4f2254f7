"""The base of every block of the run file, and the one-line documentation each field carries."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Frozen(BaseModel):
    """A block of the run file: immutable, and closed to keys it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), validate_default=True, allow_inf_nan=False
    )


def doc(description: str, default: Any = ..., **constraints: Any) -> Any:
    """A field with its one line of documentation; `constraints` are pydantic's (`gt`, `ge`, `le`, ...)."""
    return Field(default, description=description, **constraints)
