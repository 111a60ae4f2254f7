"""Records how a cell ended, beside its results."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from drivetrain.runtime.atomic_file import write_whole

Status = Literal["completed", "refused", "failed", "out of memory", "crashed", "timed out"]
FILE = "outcome.json"
DISTURBED = 0.05  # share of the machine's processor time that other programs took, above which a rate means little


class Outcome(BaseModel):
    """How a cell ended. key: of the cell whose result this is. seconds: wall time of the cell's process, start-up
    included. foreign_share: of the machine's processor time, taken by other programs meanwhile; None if it is not
    known."""

    model_config = ConfigDict(frozen=True)

    key: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    foreign_share: float | None = None

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs took so much processor time that the cell's rate means little."""
        return self.foreign_share is not None and self.foreign_share > DISTURBED

    def write(self, folder: Path) -> None:
        """Writes the outcome. A cell without one is run again."""
        write_whole(folder / FILE, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Outcome | None:
        """Reads the outcome; None if there is none, or none that can be read."""
        try:
            return cls.model_validate_json((folder / FILE).read_bytes())
        except (OSError, ValidationError):
            return None
