"""The facts that a format's writer returns about its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Written:
    """weights: name → [dtype, SHA-256] that a runtime must load, where it shows its weights. asked: further fields of
    the question to the runtime. script: lines of Python that use the export, for the card; empty where the format's
    own call is the usual one. unknown: the token of which the runtime's tokenizer makes one where the run's makes
    several in a row."""

    weights: dict[str, list[str]] | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    script: str = ""
    unknown: int | None = None
