"""A run whose processes are killed at random moments, and what it must come to all the same.

`killed` starts a run and kills; `same_end` compares what it left with an undisturbed run, to the bit.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from drivetrain.checkpoint.directory import load, newest_good
from drivetrain.checkpoint.state import same
from drivetrain.tracking.jsonl import read_events
from tests.launch.test_start import command, losses

MOST_SECONDS = 400
FEWEST = 5  # steps
WARM = "warm-rank"  # what the system calls a forked rank, which has no command of its own


@dataclass
class Ended:
    code: int
    words: str
    moments: list[int] = field(default_factory=list)  # newest point of the curve at each kill


def ranks_of(launcher: int) -> list[psutil.Process]:
    """Its ranks, which are its children that were started as such or forked (bench/warm.py); not their loaders'."""
    found = []
    for child in children_of(launcher):
        try:
            process = psutil.Process(child)
            if "drivetrain.launch.rank" in process.cmdline() or process.name() == WARM:
                found.append(process)
        except psutil.Error:  # it ended just now
            continue
    return found


def children_of(process: int) -> list[int]:
    """Returns the processes that one has started, as Linux lists them: psutil looks at every process of a machine."""
    if not Path("/proc/self/task").is_dir():
        return [child.pid for child in psutil.Process(process).children()]
    found = []
    for each in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # it, or a thread of it, ended just now
            found += [int(child) for child in each.read_text().split()]
    return found


def killed(folder: Path, arguments: Sequence[str], output: Path, kills: int, dice: random.Random) -> Ended:
    """`drivetrain train` in `folder`, until it ends by itself: `kills` times SIGKILL, in turns for one of its ranks and
    for all, FEWEST to twice as many steps after it has started (again)."""
    process = subprocess.Popen(
        command("train", *arguments, f"output={output}"),
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    moments: list[int] = []
    try:
        until = time.monotonic() + MOST_SECONDS
        starts, wait = 0, dice.randint(FEWEST, 2 * FEWEST)
        while len(moments) < kills and process.poll() is None and time.monotonic() < until:
            step, first, begun = _seen(folder / output)
            ranks = ranks_of(process.pid)
            if begun > starts and step >= first + wait and ranks:
                for victim in ranks if len(moments) % 2 else [dice.choice(ranks)]:
                    os.kill(victim.pid, signal.SIGKILL)
                moments.append(step)
                starts, wait = begun, dice.randint(FEWEST, 2 * FEWEST)
            time.sleep(0.02)
        words, _ = process.communicate(timeout=MOST_SECONDS)
    finally:
        process.kill()
    return Ended(process.returncode, words, moments)


def _seen(output: Path) -> tuple[int, int, int]:
    """(newest step, step it started after, starts) in the run's record."""
    step = first = starts = 0
    events = output / "events.jsonl"
    for event in read_events(events) if events.exists() else ():
        if event["event"] == "run_started":
            step = first = event["first_step"]
            starts += 1
        elif event["event"] == "step":
            step = event["step"]
    return step, first, starts


def same_end(one: Path, other: Path) -> None:
    """AssertionError unless the two runs have the same curve, and the same bits in their last checkpoints."""
    assert losses(one) == losses(other)
    paths = [newest_good(folder / "checkpoints")[0] for folder in (one, other)]
    assert paths[0] is not None
    assert paths[1] is not None
    assert paths[0].name == paths[1].name
    states = [load(path) for path in paths if path is not None]
    assert same(states[0]["model"], states[1]["model"])
    assert same(states[0]["optimizer"], states[1]["optimizer"])
