"""How the threads of one operation of PyTorch wait for each other on a CPU."""

from __future__ import annotations

import os
import sys

ASLEEP = {"OMP_WAIT_POLICY": "passive"}
GIVEN = (*ASLEEP, "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")  # in any of which a user may have a say


def asleep() -> dict[str, str]:
    """Returns the environment variables with which threads sleep while they wait; none if the user has set one.

    By default they spin for milliseconds, in the hope that work comes soon. Where other programs have some of the
    cores, each small operation then waits for a thread that spins elsewhere: training took 20 times as long and more.
    docs/background/speed.md has the figures.
    """
    return {} if any(name in os.environ for name in GIVEN) else dict(ASLEEP)


def wait_asleep() -> None:
    """Sets it for this process and those that it starts. Does nothing once torch is imported: its library of threads
    has read the environment by then."""
    if "torch" not in sys.modules:
        os.environ.update(asleep())
