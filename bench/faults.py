"""The faults that chaos.py makes: deaths, a full disk, processes that stand still, a clock that jumps.

Each fault has a `hit`, which takes an instant, and a `follow`, which does what a user would do then and holds the run
to what the documentation promises of it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import psutil

if TYPE_CHECKING:
    from bench.killing import Disturbed

Ranks = Sequence[psutil.Process]
MOST_SECONDS = 180  # that a run may take to notice
HANG_SECONDS = 8  # of the run file (chaos.py)
PAUSE_SECONDS = (0.5, 4.0)
BACK_SECONDS = 1.5  # at most, until a lost node is there again


@dataclass(frozen=True)
class Fault:
    what: str  # a name of FAULTS
    when: str  # stepping, saving, starting


class Does(Protocol):
    ends: bool  # the ranks: they are started again
    relaunches: bool  # `--resume`; else the launcher that is there starts them again, and counts it

    def hit(self, run: Disturbed, ranks: Ranks) -> list[int]:
        """The processes that it hit."""

    def follow(self, run: Disturbed, victims: list[int]) -> bool:
        """False if it came too late to have an effect."""


@dataclass(frozen=True)
class RankKill:
    """SIGKILL for one rank, or for all at once. The launcher starts them again."""

    is_all: bool
    ends: ClassVar[bool] = True
    relaunches: ClassVar[bool] = False

    def hit(self, run: Disturbed, ranks: Ranks) -> list[int]:
        victims = [rank.pid for rank in ranks] if self.is_all else [run.dice.choice(ranks).pid]
        _kill(victims)
        return victims

    def follow(self, run: Disturbed, victims: list[int]) -> bool:
        del run, victims
        return True


@dataclass(frozen=True)
class LauncherKill:
    """SIGKILL for the launching process; `--resume` is typed at once, while its ranks still notice."""

    ends: ClassVar[bool] = True
    relaunches: ClassVar[bool] = True

    def hit(self, run: Disturbed, ranks: Ranks) -> list[int]:
        del ranks
        _kill([run.launchers[0].pid])
        return [run.launchers[0].pid]

    def follow(self, run: Disturbed, victims: list[int]) -> bool:
        del victims
        run.launchers[0].wait()
        run.launch("--resume")
        return True


@dataclass(frozen=True)
class NodeLoss:
    """SIGKILL for all of a machine. Of the first one: the others end, and all are started with `--resume`. Of another:
    it comes back with the same command, and the first one waits for it."""

    node: int
    ends: ClassVar[bool] = True

    @property
    def relaunches(self) -> bool:
        return self.node == 0

    def hit(self, run: Disturbed, ranks: Ranks) -> list[int]:
        del ranks
        victims = [run.launchers[self.node].pid, *(rank.pid for rank in run.ranks(self.node))]
        _kill(victims)
        return victims

    def follow(self, run: Disturbed, victims: list[int]) -> bool:
        del victims
        run.launchers[self.node].wait()
        if self.node:
            time.sleep(run.dice.uniform(0, BACK_SECONDS))
            run.launch_again(self.node)
            return True
        codes = [launcher.wait(MOST_SECONDS) for launcher in run.launchers[1:]]
        assert all(codes), f"a node goes on without the first one, exit codes {codes}: {run.printed}"
        assert "The run failed." in run.printed_since, run.printed
        run.launch("--resume")
        return True


@dataclass(frozen=True)
class FullDisk:
    """The disk is filled, to its last byte or to less than a checkpoint: the run ends, and says so and how to go on.
    Then there is room again, and `--resume` is typed."""

    ends: ClassVar[bool] = True
    relaunches: ClassVar[bool] = True

    def hit(self, run: Disturbed, ranks: Ranks) -> list[int]:
        assert run.disk is not None
        run.disk.fill(run.dice.choice([0, run.dice.randrange(2**18)]))
        return [rank.pid for rank in ranks]

    def follow(self, run: Disturbed, victims: list[int]) -> bool:
        del victims
        assert run.disk is not None
        code = run.launchers[0].wait(MOST_SECONDS)
        run.disk.free()
        if code == 0:
            return False
        text = run.printed_since
        assert code in (1, 2), f"exit code {code}: {run.printed}"
        # a start on a disk that is full already is refused before any work
        ways = (r"[Nn]o space left.*--(resume|overwrite)", r"MiB free make room")
        assert re.search(ways[code - 1], text), f"it does not say so: {run.printed}"
        run.launch("--resume")
        return True


@dataclass(frozen=True)
class Pause:
    """SIGSTOP for a rank, and SIGCONT before it is a hang: all go on."""

    ends: ClassVar[bool] = False
    relaunches: ClassVar[bool] = False

    def hit(self, run: Disturbed, ranks: Ranks) -> list[int]:
        victim = run.dice.choice(ranks)
        victim.suspend()
        time.sleep(run.dice.uniform(*PAUSE_SECONDS))
        with_state = victim.status() if victim.is_running() else "gone"
        assert with_state == psutil.STATUS_STOPPED, f"rank {victim} is {with_state}, not stopped: {run.printed}"
        victim.resume()
        return [victim.pid]

    def follow(self, run: Disturbed, victims: list[int]) -> bool:
        del run, victims
        return True


@dataclass(frozen=True)
class Stop:
    """SIGSTOP for a rank, for good: it is named as what the others wait for, ended, and all start again."""

    ends: ClassVar[bool] = True
    relaunches: ClassVar[bool] = False

    def hit(self, run: Disturbed, ranks: Ranks) -> list[int]:
        victim = run.dice.choice(ranks)
        victim.suspend()
        return [victim.pid]

    def follow(self, run: Disturbed, victims: list[int]) -> bool:
        until = time.monotonic() + MOST_SECONDS
        while psutil.pid_exists(victims[0]):
            assert time.monotonic() < until, f"the stopped rank {victims} is not ended: {run.printed}"
            time.sleep(0.05)
        until = time.monotonic() + MOST_SECONDS
        while f"is stopped by a signal (SIGSTOP): process {victims[0]}" not in run.printed_since:
            assert time.monotonic() < until, f"the stopped rank {victims} is not named: {run.printed}"
            time.sleep(0.05)
        return True


@dataclass(frozen=True)
class ClockJump:
    """The wall clock of all of the run's processes is set, minutes or days ahead or back: nothing comes of it."""

    ends: ClassVar[bool] = False
    relaunches: ClassVar[bool] = False

    def hit(self, run: Disturbed, ranks: Ranks) -> list[int]:
        assert run.clock is not None
        run.clock.jump(run.dice)
        return [rank.pid for rank in ranks]

    def follow(self, run: Disturbed, victims: list[int]) -> bool:
        del run, victims
        return True


FAULTS: dict[str, Does] = {
    "one rank": RankKill(False),
    "all ranks": RankKill(True),
    "launcher": LauncherKill(),
    "other node": NodeLoss(1),
    "first node": NodeLoss(0),
    "full disk": FullDisk(),
    "stopped for good": Stop(),
    "stopped for a while": Pause(),
    "clock jump": ClockJump(),
}


def _kill(victims: Sequence[int]) -> None:
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
