"""One run that is disturbed again and again, and what must be there after each fault (chaos.py).

What is done to it: faults.py. When: some random number of steps after it steps again, or at a random moment while it
starts; or in the middle of a save, some milliseconds after the folder of an unfinished checkpoint is seen.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.chaos_machine import Clock, Disk
from bench.faults import FAULTS, Fault
from bench.warm import Born, Nursery, reap
from drivetrain.checkpoint.directory import read_manifest, verify
from drivetrain.tracking.jsonl import read_events
from tests.launch.chaos import ranks_of
from tests.launch.test_start import command, free_port

KEEP_LAST, KEEP_BEST = 3, 1
MOST_SECONDS = 180  # that a run may take to come to the next moment
STEPS = 14  # from a start to a fault, at most
SAVING_SECONDS = 0.05
STARTING_SECONDS = {True: 1.0, False: 4.0}  # warm or not

Launcher = subprocess.Popen[bytes] | Born


@dataclass(frozen=True)
class Made:
    fault: Fault
    inside_save: bool  # an unfinished checkpoint was there just before and just after
    starts: int  # of the run, before it
    newest: int  # step of the newest whole checkpoint just before
    step: int  # the curve's newest


@dataclass
class Disturbed:
    """A run in `folder`, started with `arguments` on each of its nodes, while it is disturbed.

    nursery: where its launchers come from; without one each start imports everything. output: relative to the folder,
    or on the disk that may be filled.
    """

    folder: Path
    output: Path
    arguments: Sequence[str]
    dice: random.Random
    environment: dict[str, str]
    nodes: int = 1
    nursery: Nursery | None = None
    disk: Disk | None = None
    clock: Clock | None = None
    made: list[Made] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)  # of each checkpoint ever seen that was evaluated
    launchers: list[Launcher] = field(default_factory=list)
    relaunched: bool = False
    launched: float = 0.0  # when it was launched last
    lasted: float = 0.0  # from then to its end

    def run(self, faults: list[Fault]) -> float:
        """Runs until it ends; takes faults from the front of the list as long as there are some. Returns the seconds
        that went by. AssertionError if it fails, or if a fault cost a checkpoint."""
        started, self._left, self._gone = time.monotonic(), len(faults), set[int]()
        self._starts = self._step = self._logged = 0
        self.launch()
        try:
            while faults and (ranks := self._moment(faults[0])):
                self._left = len(faults) - 1
                if self._strike(faults.pop(0), ranks):
                    self._check_checkpoints()
            codes = [launcher.wait(MOST_SECONDS) for launcher in self.launchers]
        finally:
            for launcher in self.launchers:
                launcher.kill()
        self.lasted = time.monotonic() - self.launched
        assert not any(codes), f"exit codes {codes}: {self.printed}"
        self._check_starts()
        return time.monotonic() - started

    # --- for faults ----------------------------------------------------------------------------------------------

    def launch(self, *options: str) -> None:
        """Starts every node, allowed as many restarts as there are faults: a death of another cause ends the run, and
        is noticed."""
        # a node that is lost may be a death twice, by its peer and by a meeting that was over
        allowed = max(self._left, 1) * self.nodes
        self._words = ["train", *self.arguments, f"output={self.output}", f"max_restarts={allowed}", *options]
        if self.nodes > 1:
            self._words += ["--nodes", str(self.nodes), "--rendezvous", f"127.0.0.1:{free_port()}"]
        self.relaunched, self.launched = bool(options), time.monotonic()
        self.launchers = [self._launcher(node) for node in range(self.nodes)]

    def launch_again(self, node: int) -> None:
        """Starts one node with the same command."""
        self.launchers[node] = self._launcher(node)

    def ranks(self, node: int | None = None) -> list[psutil.Process]:
        """Returns the ranks that work now, of one node or of all: none of an earlier attempt that is still ending."""
        launchers = self.launchers if node is None else [self.launchers[node]]
        found = [rank for each in launchers if each.poll() is None for rank in ranks_of(each.pid)]
        return [rank for rank in found if rank.pid not in self._gone]

    @property
    def printed(self) -> str:
        """Returns the end of what was printed."""
        return self._log.read_text(errors="replace")[-4000:]

    @property
    def printed_since(self) -> str:
        """Returns what was printed since the fault, in one line."""
        return " ".join(self._log.read_bytes()[self._logged :].decode(errors="replace").split())

    @property
    def _log(self) -> Path:
        return self.folder / f"{self.output.name}.log"

    def _launcher(self, node: int) -> Launcher:
        words = [*self._words, *(["--node-rank", str(node)] if self.nodes > 1 else [])]
        with self._log.open("ab") as log:
            if self.nursery is not None:
                return self.nursery.launcher(words, self.folder, self.environment, log)
            return subprocess.Popen(
                command(*words), cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    # --- the moment ----------------------------------------------------------------------------------------------

    def _moment(self, fault: Fault) -> list[psutil.Process] | None:
        """Waits for the moment. Returns the ranks, or None if the run ended by itself first."""
        steps = self.dice.randrange(STEPS)
        for _ in self._polled():
            if self.ranks() and (fault.when == "starting" or self._made_since() > steps):
                break
        else:
            return None
        if fault.when == "starting":
            time.sleep(self.dice.uniform(0, STARTING_SECONDS[self.nursery is not None]))
        if fault.when == "saving":
            if not any(self._unfinished for _ in self._polled(0.0005)):
                return None
            time.sleep(self.dice.uniform(0, SAVING_SECONDS))
        ranks = self.ranks()
        return ranks if ranks and all(launcher.poll() is None for launcher in self.launchers) else None

    def _polled(self, pause: float = 0.02) -> Iterator[None]:
        until = time.monotonic() + MOST_SECONDS
        while all(launcher.poll() is None for launcher in self.launchers):
            assert time.monotonic() < until, f"nothing happens: {self.printed}"
            yield
            time.sleep(pause)

    def _events(self) -> list[dict[str, Any]]:
        path = self.folder / self.output / "events.jsonl"
        return list(read_events(path)) if path.exists() else []

    def _made_since(self) -> int:
        """Counts the steps since the last fault, by ranks that started after the last death."""
        events = self._events()
        starts = [event["first_step"] for event in events if event["event"] == "run_started"]
        made = [event["step"] for event in events if event["event"] == "step"]
        return max(made, default=0) - max(starts[-1], self._step) if len(starts) > self._starts else 0

    # --- the fault -----------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault, ranks: list[psutil.Process]) -> bool:
        """Does it, and returns whether it had an effect: a run that ends just then is spared some faults."""
        does = FAULTS[fault.what]
        self._logged, names, unfinished = self._log.stat().st_size, self._whole, self._unfinished
        victims = does.hit(self, ranks)
        unfinished &= self._unfinished
        self._note_metrics(names)
        newest = max((int(name.removeprefix("step-")) for name in names), default=0)
        events = self._events()
        starts = sum(event["event"] == "run_started" for event in events)
        step = max((event["step"] for event in events if event["event"] == "step"), default=0)
        if does.ends:
            self._gone |= {rank.pid for rank in ranks}
            self._starts = starts
        self._step = 0 if does.ends else step
        if not does.follow(self, victims):
            return False
        self.made.append(Made(fault, bool(unfinished), starts, newest, step))
        self._before = names
        if does.ends:
            _, alive = psutil.wait_procs(ranks, timeout=60)
            assert not alive, f"ranks outlive {fault} by a minute: {alive}"
        reap([launcher.pid for launcher in self.launchers])
        return True

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

    def _check_checkpoints(self) -> None:
        """Every checkpoint that was whole at the fault is there and verifies, unless retention took it."""
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
        # what came when all was done already had no consequence
        self.made = [made for made in self.made if made.starts < len(firsts) or not FAULTS[made.fault.what].ends]
        for made in self.made:
            if FAULTS[made.fault.what].ends:
                assert firsts[made.starts] >= made.newest, f"{made} threw a checkpoint away: {firsts}"
        skipped = [e["message"] for e in events if e["event"] == "warning" and "skipped" in e["message"]]
        assert not skipped, skipped


def kept(names: set[str], losses: dict[str, float]) -> set[str]:
    """Returns what retention keeps of checkpoints."""
    evaluated = sorted((name for name in names if name in losses), key=lambda name: (losses[name], name))
    return {*sorted(names)[-KEEP_LAST:], *evaluated[:KEEP_BEST]}


def _metric(checkpoint: Path) -> float | None:
    try:
        return read_manifest(checkpoint).facts.get("metric")
    except OSError:  # retention took it just now
        return None
