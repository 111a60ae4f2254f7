"""Ranks that say at each instant what they are doing, as phased_run.py has it for a run of one process.

A nursery (warm.py) that imports this module has such ranks. Each has a file in the folder PHASES, named by its rank and
its process. Its notes of what it asks for begin with the number of its process.
"""

from __future__ import annotations

import os
from pathlib import Path

from bench.phased_run import Shared, mark
from drivetrain.launch import rank

_usual = rank.main


def _phased(folder: Path, parent: int) -> None:
    os.environ["RUN_START"] = str(os.getpid())
    mark(Shared(Path(os.environ["PHASES"]) / f"{os.environ['RANK']}-{os.getpid()}"))
    _usual(folder, parent)


rank.main = _phased
