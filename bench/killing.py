"""One run that is killed again and again, and what must be there after each kill (chaos.py).

Who: one of its ranks, all of them at once, or the process that launched them, after which `--resume` is typed at once,
while its ranks still notice. When: a random moment within some seconds after the run steps again, or while it starts;
or in the middle of a save, some milliseconds after the folder of an unfinished checkpoint is seen.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from drivetrain.checkpoint.directory import read_manifest, verify
from drivetrain.tracking.jsonl import read_events
from tests.launch.chaos import ranks_of
from tests.launch.test_start import command

KEEP_LAST, KEEP_BEST = 3, 1
MOST_SECONDS = 180  # that a run may take to come to the next moment
STEPPING_SECONDS, STARTING_SECONDS, SAVING_SECONDS = 3.0, 4.0, 0.1


@dataclass(frozen=True)
class Kill:
    who: str  # one rank, all ranks, launcher
    when: str  # stepping, saving, starting


@dataclass(frozen=True)
class Made:
    kill: Kill
    inside_save: bool  # an unfinished checkpoint was there just before and just after
    starts: int  # of the run, before it
    newest: int  # step of the newest whole checkpoint just before


@dataclass
class Disturbed:
    """A run in `folder`, started with `arguments`, while it is killed."""

    folder: Path
    output: Path
    arguments: Sequence[str]
    dice: random.Random
    environment: dict[str, str]
    made: list[Made] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)  # of each checkpoint ever seen that was evaluated

    def run(self, kills: list[Kill]) -> float:
        """Until it ends; takes kills from the front of the list as long as there are some. Gives the seconds that
        went by. AssertionError if it fails, or if a kill cost a checkpoint."""
        started = time.time()
        launcher, before = self._launch(len(kills)), set[int]()
        try:
            while kills and (ranks := self._moment(launcher, kills[0], before)):
                before |= {rank.pid for rank in ranks}
                self._strike(launcher, kills.pop(0), ranks)
                if self.made[-1].kill.who == "launcher":
                    launcher = self._launch(len(kills), "--resume")
                self._check_checkpoints(ranks)
            code = launcher.wait(MOST_SECONDS)
        finally:
            launcher.kill()
        assert code == 0, self.said
        self._check_starts()
        return time.time() - started

    @property
    def said(self) -> str:
        return (self.folder / f"{self.output.name}.log").read_text(errors="replace")[-4000:]

    def _launch(self, kills: int, *options: str) -> subprocess.Popen[bytes]:
        """Allowed as many restarts as there are kills: a death of another cause ends the run, and is noticed."""
        words = command("train", *self.arguments, f"output={self.output}", f"max_restarts={max(kills, 1)}", *options)
        with (self.folder / f"{self.output.name}.log").open("ab") as log:
            return subprocess.Popen(words, cwd=self.folder, env=self.environment, stdout=log, stderr=log)

    # --- the moment ----------------------------------------------------------------------------------------------

    def _moment(self, launcher: subprocess.Popen[bytes], kill: Kill, before: set[int]) -> list[psutil.Process] | None:
        """The ranks, once it has come; None if the run ended by itself first. before: ranks of earlier attempts."""
        starts = self.made[-1].starts if self.made else 0
        for _ in self._polled(launcher):
            ranks = [rank for rank in ranks_of(launcher.pid) if rank.pid not in before]
            if ranks and (kill.when == "starting" or self._steps_since(starts)):
                break
        else:
            return None
        time.sleep(self.dice.uniform(0, STARTING_SECONDS if kill.when == "starting" else STEPPING_SECONDS))
        if kill.when == "saving":
            if not any(self._unfinished for _ in self._polled(launcher, 0.0005)):
                return None
            time.sleep(self.dice.uniform(0, SAVING_SECONDS))
        return [rank for rank in ranks_of(launcher.pid) if rank.pid not in before]

    def _polled(self, launcher: subprocess.Popen[bytes], pause: float = 0.05) -> Iterator[None]:
        until = time.monotonic() + MOST_SECONDS
        while launcher.poll() is None:
            assert time.monotonic() < until, f"nothing happens: {self.said}"
            yield
            time.sleep(pause)

    def _events(self) -> list[dict[str, Any]]:
        path = self.folder / self.output / "events.jsonl"
        return list(read_events(path)) if path.exists() else []

    def _steps_since(self, starts: int) -> bool:
        kinds = [event["event"] for event in self._events()]
        return kinds.count("run_started") > starts and kinds[-1] != "run_started"

    # --- the kill ------------------------------------------------------------------------------------------------

    def _strike(self, launcher: subprocess.Popen[bytes], kill: Kill, ranks: list[psutil.Process]) -> None:
        victims = {"one rank": [self.dice.choice(ranks).pid], "all ranks": [rank.pid for rank in ranks]}
        names, unfinished = self._whole, self._unfinished
        for victim in victims.get(kill.who, [launcher.pid]):
            os.kill(victim, signal.SIGKILL)
        unfinished &= self._unfinished
        if kill.who == "launcher":
            launcher.wait()
        self._note_metrics(names)
        newest = max((int(name.removeprefix("step-")) for name in names), default=0)
        starts = sum(event["event"] == "run_started" for event in self._events())
        self.made.append(Made(kill, bool(unfinished), starts, newest))
        self._before = names

    def _note_metrics(self, names: set[str]) -> None:
        self.metrics |= {name: metric for name in names if (metric := _metric(self._checkpoints / name)) is not None}

    @property
    def _checkpoints(self) -> Path:
        return self.folder / self.output / "checkpoints"

    def _names(self, pattern: str) -> set[str]:
        return {path.name for path in self._checkpoints.glob(pattern)}

    @property
    def _whole(self) -> set[str]:
        return self._names("step-*")

    @property
    def _unfinished(self) -> set[str]:
        return self._names(".step-*")

    # --- what must be there --------------------------------------------------------------------------------------

    def _check_checkpoints(self, ranks: list[psutil.Process]) -> None:
        """Every checkpoint that was whole at the kill is there and verifies, unless retention took it."""
        _, alive = psutil.wait_procs(ranks, timeout=60)
        assert not alive, f"ranks outlive a kill by a minute: {alive}"
        there = self._whole
        self._note_metrics(there)  # a rank that outlived the launcher may have saved a better one
        wrong = {name: found for name in there if (found := verify(self._checkpoints / name))}
        wrong = {name: found for name, found in wrong.items() if (self._checkpoints / name).exists()}
        assert not wrong, f"after {self.made[-1]}: {wrong}"
        lost = (self._before - there) & kept(self._before | there, self.metrics)
        replaced = {name.split(".")[1] for name in self._names(".step-*.replaced-*")}
        assert not lost - replaced, f"lost by {self.made[-1]}: {lost}; there: {there}"

    def _check_starts(self) -> None:
        """Each start went on from the newest checkpoint there was, or a later one."""
        events = self._events()
        firsts = [event["first_step"] for event in events if event["event"] == "run_started"]
        for made in self.made:
            assert firsts[made.starts] >= made.newest, f"{made} threw a checkpoint away: {firsts}"
        skipped = [e["message"] for e in events if e["event"] == "warning" and "skipped" in e["message"]]
        assert not skipped, skipped


def kept(names: set[str], losses: dict[str, float]) -> set[str]:
    """What retention keeps of checkpoints."""
    evaluated = sorted((name for name in names if name in losses), key=lambda name: (losses[name], name))
    return {*sorted(names)[-KEEP_LAST:], *evaluated[:KEEP_BEST]}


def _metric(checkpoint: Path) -> float | None:
    try:
        return read_manifest(checkpoint).facts.get("metric")
    except OSError:  # retention took it just now
        return None
