"""How a cell ended, kept beside its results."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from drivetrain.runtime.atomic_file import write_whole

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
        """A cell without one is run anew."""
        write_whole(folder / FILE, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Outcome | None:
        """None if there is none, or none that can be read."""
        try:
            return cls.model_validate_json((folder / FILE).read_bytes())
        except (OSError, ValidationError):
            return None
