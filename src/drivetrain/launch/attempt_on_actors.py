"""One attempt of a run whose ranks are held by actors on other machines: started together, looked at once a second.

What the ranks leave (outcomes, records, output) is brought into the launch's folder on this machine, where the same
code as under torch elastic finds out which failure came first.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from drivetrain.errors import RankError
from drivetrain.launch.diagnostics.hang_report import Row, blame, in_full, table
from drivetrain.launch.diagnostics.stack_request import forget, pulse_file
from drivetrain.launch.diagnostics.stillness import Stillness
from drivetrain.launch.diagnostics.stranded_ranks import STILL_SECONDS
from drivetrain.launch.elastic import Died, Hung, result_of
from drivetrain.launch.job import Job, Result
from drivetrain.launch.outcome import RankOutcome, clear, stranded
from drivetrain.launch.rank import TASK
from drivetrain.launch.rank_process import Seen
from drivetrain.runtime import storage
from drivetrain.runtime.attempt import Attempt
from drivetrain.runtime.heartbeat import read
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.runtime.signals import StopRequest, stop_on_signals

POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Member:
    """A rank and the actor that holds its process. address: of its machine."""

    rank: int
    local_rank: int
    on_its_machine: int
    address: str
    actor: Any


class AttemptOnActors:
    def __init__(
        self,
        task: Job,
        folder: Path,
        members: Sequence[Member],
        answers: Callable[[Sequence[Any]], list[Any]],
        kept: dict[str, str],
    ) -> None:
        """answers: waits for calls of actors, and returns for one that is lost a RankError. kept: of earlier attempts,
        and of this one for the next."""
        self._task, self._folder, self._members, self._answers, self._kept = task, folder, members, answers, kept
        self._moves = Stillness(time.monotonic())
        self._ended: dict[int, Any] = {}  # exit codes, and when they were seen
        self._reported: set[int] = set()
        self._signalled = False

    def run(self) -> Result:
        """Returns the first rank's result. Raises Died, or the failure that came first."""
        clear(self._folder)
        forget(self._folder)
        self._start()
        with stop_on_signals() as stop:
            while len(self._ended) < len(self._members):
                time.sleep(POLL_SECONDS)
                self._pass_on(stop)
                self._look()
                self._end_stranded()
                self._end_hung()
        return result_of(self._folder, {rank: end for rank, end in self._ended.items() if end.exitcode})

    def _start(self) -> None:
        first, world = self._members[0], len(self._members)
        [place] = self._answers([first.actor.place.remote(first.address)])
        if isinstance(place, RankError):
            raise Died(f"rank 0 was lost before it began: {place}")
        common = {"WORLD_SIZE": str(world), "MASTER_ADDR": first.address, "MASTER_PORT": str(place[1])}
        job = (self._folder / TASK).read_text(encoding="utf-8")
        attempt = Attempt.read(self._folder)
        fields = {"most": attempt.most, "restarts": list(attempt.restarts), "reduction": attempt.reduction}
        calls = []
        for member in self._members:
            own = {
                "RANK": str(member.rank),
                "LOCAL_RANK": str(member.local_rank),
                "LOCAL_WORLD_SIZE": str(member.on_its_machine),
                "GROUP_RANK": str(member.rank // member.on_its_machine),
            }
            age = time.monotonic() - attempt.since
            calls.append(member.actor.start.remote(job, age, fields, self._kept, common | own, os.getcwd()))
        for member, answer in zip(self._members, self._answers(calls), strict=True):
            if isinstance(answer, RankError):
                raise Died(f"rank {member.rank} was lost before it began: {answer}")

    def _look(self) -> None:
        running = [member for member in self._members if member.rank not in self._ended]
        seen = self._answers([member.actor.look.remote() for member in running])
        lost = [(member, each) for member, each in zip(running, seen, strict=True) if isinstance(each, RankError)]
        for member, each in zip(running, seen, strict=True):
            if isinstance(each, Seen):
                self._take(member, each)
        if lost:
            numbers = ", ".join(str(member.rank) for member, _ in lost)
            who = f"ranks {numbers} were" if len(lost) > 1 else f"rank {numbers} was"
            raise Died(f"{who} lost with an actor or machine, {lost[0][0].address}: {lost[0][1]}")

    def _take(self, member: Member, seen: Seen) -> None:
        """Brings what a rank has left into this machine's folder. The first one's output goes to the screen."""
        if member.rank == 0 and seen.said:
            sys.stderr.write(seen.said)
            sys.stderr.flush()
        elif seen.said:
            log = self._folder / "logs" / "actors" / str(member.rank) / "stderr.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a", encoding="utf-8") as opened:
                opened.write(seen.said)
        if seen.pulse is not None:
            pulse_file(self._folder, member.rank).write_bytes(seen.pulse)
        if seen.outcome is not None and member.rank not in self._reported:
            outcome = RankOutcome.model_validate_json(seen.outcome)
            outcome.model_copy(update={"time": time.monotonic() - seen.ended_before}).write(self._folder)
            self._reported.add(member.rank)
        if member.rank == 0:
            self._kept.update(seen.kept)
        if seen.code is not None:
            self._ended[member.rank] = SimpleNamespace(exitcode=seen.code, timestamp=time.time())

    def _pass_on(self, stop: StopRequest) -> None:
        """Passes SIGTERM and Ctrl-C on to all ranks, once: they agree on a step, save and end."""
        if stop.signal_number is None:
            return
        if not self._signalled:
            self._signalled = True
            self._answers([member.actor.signal.remote(int(signal.SIGTERM)) for member in self._members])
        elif stop.since is not None and time.monotonic() - stop.since > self._task.run.grace_seconds:
            raise RankError(f"ended by {signal.Signals(stop.signal_number).name}: no save within grace_seconds")

    def _still(self) -> dict[int, float]:
        """Returns the seconds in which each running rank has not gone on."""
        now = time.monotonic()
        pulses = {each.rank: read(pulse_file(self._folder, each.rank)) for each in self._members}
        running = {rank: pulse.moves for rank, pulse in pulses.items() if pulse and rank not in self._ended}
        self._moves.look(now, running)
        return {rank: self._moves.of(rank, now) for rank in running}

    def _end_stranded(self) -> None:
        """Ends ranks that stand still after another one has failed: one that waits in NCCL notices nothing."""
        bad = [rank for rank, end in self._ended.items() if end.exitcode]
        if not bad or self._signalled:
            return
        for rank, seconds in self._still().items():
            if seconds >= STILL_SECONDS:
                self._answers([self._members[rank].actor.signal.remote(int(signal.SIGKILL))])
                if rank not in self._reported:
                    stranded(rank, f"rank {min(bad)}").write(self._folder)
                    self._reported.add(rank)

    def _end_hung(self) -> None:
        """Raises Hung if no rank has gone on for hang_seconds, with a table of which one waits where."""
        limit, still = self._task.run.hang_seconds, self._still()
        if limit is None or not still or min(still.values()) < limit or len(still) < len(self._members):
            return
        found = self._answers([each.actor.stands.remote(still[each.rank]) for each in self._members])
        rows = [Row.of(row) for row in found if isinstance(row, dict)]
        folder = RunFolder(self._task.run.folder)
        if folder.run_file.exists():
            storage.make(folder.hangs)
            storage.put(folder.hangs / time.strftime("%Y-%m-%dT%H-%M-%S.txt"), in_full(rows))
        sys.stderr.write(f"\n{table(rows)}\n")
        raise Hung(f"hang: {blame(rows)} (nothing has gone on for {min(still.values()):.0f} s)")
