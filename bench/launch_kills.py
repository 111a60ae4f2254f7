"""Kills ranks and launchers of a run that learns from rewards, pairs or a teacher, for reward_kills.py.

By turns one rank is killed, drawn at random, which the launcher answers by starting all of them again; or the launcher
alone, after which `--resume` is typed at once, while its ranks still notice; or all of them together.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from bench.phased_run import CACHING, IMPORTED, Shared
from bench.reward_aims import PATIENCE, STEPS_A_KILL, aimed_at, reached
from bench.reward_checks import Killed, check
from bench.reward_runs import Place
from bench.warm import Born, Nursery, reap
from tests.launch.chaos import ranks_of

RANKS = 2
ENGINES = {"ddp": "drivetrain.engines.ddp", "fsdp": "drivetrain.engines.fsdp"}
ONE, LAUNCHER, ALL = "one rank", "the launcher", "all processes"
VICTIMS = (ONE, LAUNCHER, ONE, ALL)
BENCH = Path(__file__).resolve().parent


def killed_launches(name: str, engine: str, folder: Path, kills: int, dice: random.Random) -> Killed:
    """Kills a run on ranks so many times, and lets it end. AssertionError if anything is lost, asked for again, or
    different."""
    births = Nursery(_environment(folder), [*IMPORTED, ENGINES[engine], "bench.phased_rank"])
    try:
        return _killed(name, engine, folder, kills, dice, births)
    finally:
        births.close()


def _killed(name: str, engine: str, folder: Path, kills: int, dice: random.Random, births: Nursery) -> Killed:
    began = time.monotonic()
    whole, disturbed = (_Launched(folder / each, name, engine, kills, births) for each in ("whole", "killed"))
    whole.launch()
    assert whole.launcher.wait(PATIENCE) == 0, whole.place.log
    usual = next(iter(whole.ranks_that_were(0).values()))
    found, gone, expected = Killed(name, engine=engine), set[int](), range(1)
    disturbed.launch()
    for number in range(kills):
        ranks = disturbed.ranks(gone)
        process = dice.choice(sorted(ranks))
        aim = aimed_at(name, number, disturbed.place)
        if not reached(ranks[process], lambda: disturbed.launcher.poll() is None, aim, usual, dice):
            break
        victim, before = VICTIMS[number % len(VICTIMS)], disturbed.place.newest
        started = all(each.begun("update") for each in ranks.values())
        if started:  # else it may not have reported yet that it did
            first = disturbed.place.first_step
            assert first in expected, f"before kill {number + 1} it went on from step {first}, not of {expected}"
        found.moments.append(disturbed.kill(victim, process, ranks))
        found.victims.append(victim)
        print(f"{found.title}, kill {number + 1}: {victim}, aimed at {aim}, came in {found.moments[-1]}", flush=True)
        if victim != ONE:
            disturbed.launch()
        disturbed.see_off(ranks)
        expected = range(before, disturbed.place.newest + 1)
        gone |= {*ranks}
    assert disturbed.launcher.wait(PATIENCE) == 0, disturbed.place.log
    reap([])
    firsts = disturbed.ranks_that_were(0).values()
    found.cached = sum(each.begun(CACHING) for each in firsts)
    ends = {process: each.now() for process, each in disturbed.ranks_that_were().items()}
    check(found, whole.place, disturbed.place, ends, sum(each.now() == CACHING for each in firsts))
    found.seconds = time.monotonic() - began
    return found


class _Launched:
    """A run on ranks, and who works on it."""

    launcher: Born

    def __init__(self, folder: Path, name: str, engine: str, kills: int, births: Nursery) -> None:
        self.place = Place(folder, name, STEPS_A_KILL * kills)
        self._phases = folder / "phases"
        self._phases.mkdir()
        settings = (f"engine={engine}", f"processes={RANKS}", "micro_batch_size=4", f"max_restarts={kills}")
        self._words, self._births = (*self.place.command[:2], *settings, *self.place.command[2:]), births

    def launch(self) -> None:
        environment = {**_environment(self.place.folder), **self.place.environment, "PHASES": str(self._phases)}
        with (self.place.folder / "log").open("ab") as log:
            self.launcher = self._births.launcher(self._words, self.place.folder, environment, log)

    def ranks(self, gone: set[int]) -> Mapping[int, Shared]:
        """Returns all ranks that work now, by their processes, as soon as they do. gone: those of earlier starts."""
        until = time.monotonic() + PATIENCE
        while True:
            working = {rank.pid for rank in ranks_of(self.launcher.pid)} - gone
            found = {process: each for process, each in self.ranks_that_were().items() if process in working}
            if len(found) == RANKS:
                return found
            assert self.launcher.poll() is None, self.place.log
            assert time.monotonic() < until, f"no ranks come: {self.place.log}"
            time.sleep(0.005)

    def ranks_that_were(self, rank: int | None = None) -> Mapping[int, Shared]:
        """Returns what each start of a rank, or of all, said last, by its process."""
        found = [(*map(int, path.name.split("-")), path) for path in self._phases.iterdir()]
        return {process: Shared(path) for number, process, path in found if rank in (None, number)}

    def kill(self, victim: str, process: int, ranks: Mapping[int, Shared]) -> str:
        """Returns what was under way then in the rank of that process."""
        victims = {ONE: [process], LAUNCHER: [self.launcher.pid], ALL: [self.launcher.pid, *ranks]}[victim]
        for each in victims:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        moment = ranks[process].now()
        if victim != ONE:
            self.launcher.wait()
        return moment

    def see_off(self, ranks: Mapping[int, Shared]) -> None:
        """Waits until the ranks are gone."""
        until = time.monotonic() + PATIENCE
        while any(Path(f"/proc/{process}").exists() for process in ranks):
            reap([self.launcher.pid])
            assert time.monotonic() < until, f"ranks stay: {self.place.log}"
            time.sleep(0.002)


def _environment(folder: Path) -> dict[str, str]:
    """TMPDIR: what killed launchers leave in it goes with the folder."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    paths = os.pathsep.join([str(BENCH.parent), str(BENCH.parent / "src")])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
