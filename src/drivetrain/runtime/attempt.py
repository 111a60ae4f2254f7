"""One start of a run by its launch. When a rank dies, the launch starts the whole group again."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.runtime.atomic_file import write_whole

_FILE = "attempt.json"
_PREPARED = "prepared"
_ELAPSED = "elapsed.json"


@dataclass(frozen=True)
class Attempt:
    """One start of a run. restarts: why each earlier attempt of this launch died. folder: the launch's own on this
    machine, which outlives the attempts; without one (nothing restarts this process) nothing is remembered."""

    since: float = field(default_factory=time.monotonic)  # when the launch began: the clock of the machine's processes
    most: int = 0
    restarts: Sequence[str] = ()
    folder: Path | None = None
    reduction: dict[str, Any] | None = None  # of the micro-batches, since memory ran out

    @classmethod
    def read(cls, folder: Path) -> Attempt:
        return cls(**json.loads((folder / _FILE).read_text(encoding="utf-8")), folder=folder)

    def write(self) -> None:
        assert self.folder is not None
        fields = {name: value for name, value in asdict(self).items() if name != "folder"}
        write_whole(self.folder / _FILE, json.dumps(fields))

    @property
    def notices(self) -> list[str]:
        """Returns this attempt's notices; those of earlier attempts are in the record already."""
        return [f"restart {len(self.restarts)} of at most {self.most}: {self.restarts[-1]}"] if self.restarts else []

    @property
    def goes_on(self) -> bool:
        """Returns whether an earlier attempt prepared the run's folder, so that this one must not begin anew there."""
        return self.folder is not None and (self.folder / _PREPARED).exists()

    def prepared(self) -> None:
        if self.folder is not None:
            (self.folder / _PREPARED).touch()

    def unprepared(self) -> None:
        if self.folder is not None:
            (self.folder / _PREPARED).unlink(missing_ok=True)

    def elapsed_before(self, elapsed_seconds: float) -> float:
        """Returns the run's time when the launch began, which the first attempt records."""
        if self.folder is None:
            return elapsed_seconds
        if not (self.folder / _ELAPSED).exists():
            write_whole(self.folder / _ELAPSED, json.dumps(elapsed_seconds))
        return float(json.loads((self.folder / _ELAPSED).read_text(encoding="utf-8")))

    def kept(self) -> dict[str, str]:
        """Returns what an attempt in another folder has to know of this one."""
        assert self.folder is not None
        files = [self.folder / name for name in (_PREPARED, _ELAPSED)]
        return {file.name: file.read_text(encoding="utf-8") for file in files if file.exists()}

    def restore(self, kept: Mapping[str, str]) -> None:
        """Restores what `kept` returned."""
        assert self.folder is not None
        for name in kept.keys() & {_PREPARED, _ELAPSED}:
            write_whole(self.folder / name, kept[name])
