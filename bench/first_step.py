"""Tells startup.py when a training has made its first step: the time goes into the file of BENCH_FIRST_STEP.

Beside it lie the processor seconds until then: of this process and, where a launcher started it, of the launcher and
all ranks. They hold on a busy machine as well, where the clock does not.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

VARIABLE = "BENCH_FIRST_STEP"


def stamp() -> None:
    path = Path(os.environ[VARIABLE])
    if not path.exists():
        path.write_text(f"{time.time()} {processor_seconds()}")


def processor_seconds() -> float:
    own = psutil.Process()
    launcher = own.parent() if "WORLD_SIZE" in os.environ else own
    assert launcher is not None, "a rank's launcher waits for it"
    times = [each.cpu_times() for each in (launcher, *launcher.children(recursive=True))]
    return sum(each.user + each.system for each in times)
