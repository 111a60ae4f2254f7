"""A disk that can be filled and a clock that can be set, for the runs of chaos.py alone."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

SHIM = Path(__file__).with_name("chaos_clock.c")
DISK_BYTES = 32 * 2**20
JUMP_SECONDS = (60, 200_000)


@dataclass
class Disk:
    """A small file system in memory, mounted at `folder`."""

    folder: Path
    filler: Path = field(init=False)

    def __post_init__(self) -> None:
        """OSError where mounting is not permitted."""
        self.filler = self.folder / "filler"
        self.folder.mkdir(parents=True, exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.folder)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"a small disk cannot be mounted: {done.stderr.strip()}")

    def fill(self, slack: int) -> None:
        """To its end, but for `slack` bytes."""
        with self.filler.open("wb", buffering=0) as file:
            size = max(0, shutil.disk_usage(self.folder).free - slack)
            while size > 0:
                try:
                    size -= file.write(bytes(min(size, 2**20)))
                except OSError:  # the run was quicker
                    return

    def free(self) -> None:
        self.filler.unlink(missing_ok=True)

    def empty(self) -> None:
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=False)


@dataclass
class Clock:
    """The wall clock of processes that have `variables` in their environment."""

    folder: Path
    variables: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        """OSError where there is no C compiler."""
        self.folder.mkdir(parents=True, exist_ok=True)
        library, self._offset = self.folder / "clock.so", self.folder / "offset"
        self.set(0)
        words = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(SHIM), "-ldl"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{SHIM.name} cannot be compiled: {done.stderr.strip()}")
        self.variables = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self._offset)}

    def set(self, seconds: int) -> None:
        """So far ahead of the machine's."""
        if not self._offset.exists():
            self._offset.write_bytes(bytes(8))
        with self._offset.open("r+b") as file:
            file.write(struct.pack("q", seconds))

    def jump(self, dice: random.Random) -> None:
        self.set(round(dice.choice([-1, 1]) * dice.uniform(*JUMP_SECONDS)))
