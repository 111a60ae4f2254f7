"""How a cell ended, kept beside its results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

Status = Literal["completed", "refused", "failed", "out of memory", "crashed", "timed out"]
FILE = "outcome.json"


class Outcome(BaseModel):
    """key: of the cell whose result this is. seconds: wall time of the cell's process, start-up included."""

    model_config = ConfigDict(frozen=True)

    key: str
    status: Status
    reason: str = ""
    seconds: float = 0.0

    def write(self, folder: Path) -> None:
        """Whole or not at all: a cell without one is run anew."""
        aside = folder / f".{FILE}.{os.getpid()}"
        aside.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        aside.replace(folder / FILE)

    @classmethod
    def read(cls, folder: Path) -> Outcome | None:
        """None if there is none, or none that can be read."""
        try:
            return cls.model_validate_json((folder / FILE).read_bytes())
        except (OSError, ValidationError):
            return None
