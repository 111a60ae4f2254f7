"""Two training processes that work in turns of a few steps: for differences of a percent.

Whole runs of the same program differ by 10 % and more on a shared host, even where nothing else runs in the virtual
machine: neighbours outside take memory bandwidth and clock. That drift is slow against a second. So both processes
stay alive and take turns, ten steps each, the same ten batches, the order swapping from turn to turn (A B, B A, ...);
one waits while the other works. Turns with foreign work are left out on both sides, whatever their speed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interleaved import BENCH, ForeignWork, Measurement, Pair, child_environment, failed, wait_until_idle
from turns import VARIABLE

TURN_LIMIT_CORES = 0.1  # a turn is short, and the kernel counts processor time in hundredths of a second


@dataclass(frozen=True)
class Turn:
    step: int  # the last one of the turn
    seconds: float
    used_seconds: float  # of processor time, over all threads of the process
    foreign_cores: float


class Child:
    """A process that takes turns."""

    def __init__(self, script: str, run_file: Path, result_file: Path) -> None:
        result_file.unlink(missing_ok=True)
        self._script, self._result, self._log = script, result_file, result_file.with_suffix(".log")
        their_read, go = os.pipe()
        said, their_write = os.pipe()
        command = [sys.executable, str(BENCH / script), str(run_file), str(result_file)]
        with self._log.open("w") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=child_environment(**{VARIABLE: f"{their_read},{their_write}"}),
                pass_fds=(their_read, their_write),
            )
        os.close(their_read)
        os.close(their_write)
        self._go = os.fdopen(go, "wb", buffering=0)
        self._lines = os.fdopen(said)

    def first_turn(self) -> None:
        """Start-up and the steps that are not steady. The child begins by itself."""
        self._listen()

    def take_turn(self) -> Turn:
        watch = ForeignWork()
        self._go.write(b".")
        turn = self._listen()
        foreign = watch.cores(children_seconds=turn["used"])  # the child lives on: nobody has waited for it yet
        return Turn(turn["step"], turn["seconds"], turn["used"], foreign)

    def finish(self) -> dict[str, Any]:
        """Let it end; what it reported."""
        self._go.write(b".")
        code = self._process.wait()
        if code != 0 or not self._result.exists():
            raise failed(self._script, code, self._log)
        facts: dict[str, Any] = json.loads(self._result.read_text())
        return facts

    def stop(self) -> None:
        """Leave nothing behind, however it went."""
        self._go.close()
        self._lines.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _listen(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise failed(self._script, self._process.wait(), self._log)
        turn: dict[str, Any] = json.loads(line)
        return turn


def lockstep(ours: Child, theirs: Child, num_turns: int, samples_a_turn: int, swap: bool = False) -> Pair:
    """One pair from two fresh processes. swap: the other side has the first turn."""
    turns: list[tuple[Turn, Turn]] = []
    try:
        for child in (ours, theirs):
            child.first_turn()
        wait_until_idle()
        for number in range(num_turns):
            if number % 2 == swap:
                mine = ours.take_turn()
                turns.append((mine, theirs.take_turn()))
            else:
                other = theirs.take_turn()
                turns.append((ours.take_turn(), other))
            if not is_quiet(turns[-1]):
                wait_until_idle()
        facts = ours.finish(), theirs.finish()
    finally:
        ours.stop()
        theirs.stop()
    return joined(turns, samples_a_turn, *facts)


def is_quiet(both: tuple[Turn, Turn]) -> bool:
    return max(turn.foreign_cores for turn in both) <= TURN_LIMIT_CORES


def joined(
    turns: Sequence[tuple[Turn, Turn]], samples_a_turn: int, our_facts: dict[str, Any], their_facts: dict[str, Any]
) -> Pair:
    """Rates over the quiet turns. A pair with fewer than half of its turns quiet counts as disturbed."""
    assert all(mine.step == other.step for mine, other in turns), "both sides do the same steps"
    quiet = [both for both in turns if is_quiet(both)]
    enough = 2 * len(quiet) >= len(turns)
    sides = []
    for number, facts in enumerate((our_facts, their_facts)):
        used = [both[number] for both in (quiet if enough else turns)]
        rate = samples_a_turn * len(used) / sum(turn.seconds for turn in used)
        foreign = statistics.fmean(turn.foreign_cores for turn in used)
        counted = {
            "quiet_turns": len(quiet),
            "turns": len(turns),
            "processor_seconds": sum(turn.used_seconds for turn in used),
        }
        sides.append(Measurement(rate, foreign, {**facts, **counted}))
    return Pair(sides[0], sides[1], disturbed=not enough)
