"""Two ways of doing the same work, timed in turns, on a machine that does nothing else.

Speeds of one machine drift over minutes (clock, heat, neighbours), so the two sides are measured in pairs: within a
pair they see the same conditions, and the order swaps from pair to pair (A B, B A, ...), so that a steady drift favours
neither. One busy foreign thread can slow two-thread training steps several times over; so each measurement waits for
an idle machine, counts the processor time that others took meanwhile, and a pair that was disturbed is discarded and
repeated. What decides is the foreign time alone, never the speed: discarding by result would choose the result.

Each measurement is a process of its own. Turns within one process would share what cannot be put back: malloc's
thresholds and its heap, kernels replaced below autograd, thread pools, oneDNN's cache of primitives. Start-up is kept
out of the figures by what the child reports, not by sharing a process. Where whole runs vary too much for the
difference sought, lockstep.py keeps two processes alive and lets them take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.measure.other_programs import busy_seconds, own_seconds

BENCH = Path(__file__).resolve().parent
LIMIT_CORES = 0.05  # more foreign processor time than this share of a core disturbs a measurement
IDLE_SECONDS = 3.0  # the machine must have been this quiet for this long before a measurement
PATIENCE_SECONDS = 120.0  # then it is measured all the same; the pair is judged by what happened meanwhile


def add_options(parser: argparse.ArgumentParser, pairs: int) -> None:
    """Adds the options of how often a case is measured, and how quiet the machine must be meanwhile."""
    parser.add_argument("--pairs", type=int, default=pairs, help="undisturbed pairs a case")
    parser.add_argument("--foreign", type=float, default=LIMIT_CORES, help="cores of foreign work a pair may have")
    parser.add_argument("--attempts", type=int, help="most pairs a case; left out, twice --pairs")


@dataclass(frozen=True)
class Measurement:
    """One side once."""

    rate: float  # samples a second
    foreign_cores: float  # processor time of others while it ran, per second
    facts: dict[str, Any] = field(default_factory=dict)  # whatever else the child reported


Side = Callable[[], Measurement]


@dataclass(frozen=True)
class Pair:
    ours: Measurement
    theirs: Measurement
    disturbed: bool

    @property
    def ratio(self) -> float:
        """Above 1: ours is quicker."""
        return self.ours.rate / self.theirs.rate

    @property
    def foreign_cores(self) -> float:
        return max(self.ours.foreign_cores, self.theirs.foreign_cores)


def repeat(measure_pair: Callable[[int], Pair], num_pairs: int, max_attempts: int | None = None) -> Iterator[Pair]:
    """Pairs as they are measured, disturbed ones included, until num_pairs are undisturbed.

    measure_pair: takes the number of the attempt, from 0. Gives up after max_attempts (left out: twice num_pairs);
    whoever reads must look at how many are good.
    """
    good = 0
    for attempt in range(max_attempts or 2 * num_pairs):
        if good == num_pairs:
            return
        pair = measure_pair(attempt)
        good += not pair.disturbed
        yield pair


def in_turns(ours: Side, theirs: Side, number: int, limit_cores: float = LIMIT_CORES) -> Pair:
    """One pair of whole runs; the order swaps from pair to pair."""
    if number % 2 == 0:
        mine = ours()
        other = theirs()
    else:
        other = theirs()
        mine = ours()
    return Pair(mine, other, disturbed=max(mine.foreign_cores, other.foreign_cores) > limit_cores)


def undisturbed(pairs: Sequence[Pair]) -> list[Pair]:
    return [pair for pair in pairs if not pair.disturbed]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; linear between the ordered values, as numpy's percentile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


# --- one measurement -------------------------------------------------------------------------------------------------


def measure(script: str, run_file: Path, result_file: Path) -> Measurement:
    """Run `python bench/<script> run_file result_file` on an idle machine. The result file is JSON with `rate`."""
    wait_until_idle()
    result_file.unlink(missing_ok=True)
    log = result_file.with_suffix(".log")
    watch = ForeignWork()
    with log.open("w") as out:
        command = [sys.executable, str(BENCH / script), str(run_file), str(result_file)]
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=child_environment(), check=False)
    foreign = watch.cores()
    if done.returncode != 0 or not result_file.exists():
        raise failed(script, done.returncode, log)
    facts = json.loads(result_file.read_text())
    return Measurement(facts.pop("rate"), foreign, facts)


def child_environment(**more: str) -> dict[str, str]:
    """As it is, with the checkout's own package first, and without a model hub to ask."""
    path = os.pathsep.join(filter(None, [str(BENCH.parent / "src"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **more}


def failed(script: str, code: int, log: Path) -> RuntimeError:
    tail = "\n".join(log.read_text().splitlines()[-30:])
    return RuntimeError(f"{script} ended with code {code}:\n{tail}")


class ForeignWork:
    """Processor time of all but this process and the children it waited for, stolen time included."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.perf_counter(), busy_seconds(), own_seconds()

    def cores(self, children_seconds: float = 0.0) -> float:
        """Per second since the start, never below 0. children_seconds: used by children not waited for yet."""
        foreign = (busy_seconds() - self._busy) - (own_seconds() - self._own) - children_seconds
        return max(0.0, foreign / (time.perf_counter() - self._start))


def wait_until_idle(limit_cores: float = LIMIT_CORES) -> bool:
    """Return once the machine was idle for IDLE_SECONDS; False if PATIENCE_SECONDS passed without."""
    deadline, quiet_since = time.perf_counter() + PATIENCE_SECONDS, time.perf_counter()
    while time.perf_counter() < deadline:
        watch = ForeignWork()
        time.sleep(0.5)
        if watch.cores() > limit_cores:
            quiet_since = time.perf_counter()
        elif time.perf_counter() - quiet_since >= IDLE_SECONDS:
            return True
    return False
