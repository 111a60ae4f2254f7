"""Prints this machine as the rules see it: in a process of its own, since it imports PyTorch, which the server never
does (300 MB).

    python -m drivetrain.board.detect
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import Any

from drivetrain.config.machine import Machine
from drivetrain.errors import RunError

SECONDS = 120


class ThisMachine:
    """The machine, looked at once in the background."""

    def __init__(self) -> None:
        self._found: Machine | None = None
        self._why = ""
        self._thread = threading.Thread(target=self._look, name="detect", daemon=True)
        self._thread.start()

    def machine(self) -> Machine:
        """Waits for the answer. Raises RunError where the machine could not be looked at."""
        self._thread.join()
        if self._found is None:
            raise RunError(f"this machine could not be looked at: {self._why}")
        return self._found

    def _look(self) -> None:
        try:
            command = [sys.executable, "-m", "drivetrain.board.detect"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
            self._found = read(json.loads(done.stdout))
        except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
            self._why = str(error)[-500:]


def described(machine: Machine) -> dict[str, Any]:
    """Returns the machine as JSON has it."""
    sets = {name: sorted(value) for name, value in asdict(machine).items() if isinstance(value, frozenset)}
    return {**asdict(machine), **sets}


def read(found: dict[str, Any]) -> Machine:
    """Returns the machine that `described` described. Raises TypeError for anything else."""
    capability, packages = found["compute_capability"], found["packages"]
    return Machine(
        **{
            **found,
            "compute_capability": None if capability is None else (capability[0], capability[1]),
            "native_dtypes": frozenset(found["native_dtypes"]),
            "packages": None if packages is None else frozenset(packages),
        }
    )


if __name__ == "__main__":
    from drivetrain.memory.garbage import importing, own_process

    own_process()
    with importing():
        from drivetrain.runtime.hardware import detect

    print(json.dumps(described(detect())))
