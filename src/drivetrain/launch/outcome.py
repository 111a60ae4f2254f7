"""The outcome of one rank, on disk for the process that started it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from drivetrain.errors import OutOfMemory, PeerError, Problem, RankError, RunError, UserError
from drivetrain.launch.job import Result
from drivetrain.runtime.atomic_file import write_whole

Kind = Literal["done", "user", "memory", "run", "crash"]
# how gloo says that the other end of a connection is gone
_GLOO = re.compile(r"gloo/transport|Connection (closed|reset) by peer|Broken pipe|Connection refused")


class RankOutcome(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")  # a result may hold NaN, which would be read back as None

    rank: int
    kind: Kind
    time: float  # by time.monotonic, one clock for all of a machine: the first failure is the cause of the others
    result: Result | None = None
    problems: list[Problem] = []
    message: str = ""
    traceback: str = ""
    samples: int = 0  # of the micro-batch that memory ran out in
    tokens: int | None = None  # the most that it could have
    lost: bool = False  # it failed because another rank had ended

    def write(self, folder: Path) -> None:
        write_whole(folder / f"rank-{self.rank}.json", self.model_dump_json())


def outcomes(folder: Path) -> list[RankOutcome]:
    """Returns the outcomes of the ranks that left one, by rank."""
    found = [RankOutcome.model_validate_json(path.read_bytes()) for path in folder.glob("rank-*.json")]
    return sorted(found, key=lambda outcome: outcome.rank)


def clear(folder: Path) -> None:
    """Deletes the outcomes of an earlier attempt."""
    for path in folder.glob("rank-*.json"):
        path.unlink(missing_ok=True)


def done(rank: int, result: Result) -> RankOutcome:
    return RankOutcome(rank=rank, kind="done", time=time.monotonic(), result=result)


def failed(rank: int, error: BaseException, traceback: str) -> RankOutcome:
    now, lost = time.monotonic(), isinstance(error, PeerError) or _lost_a_peer(error)
    if isinstance(error, UserError):
        return RankOutcome(rank=rank, kind="user", time=now, problems=list(error.problems))
    if isinstance(error, OutOfMemory):
        found = RankOutcome(rank=rank, kind="memory", time=now, message=str(error))
        return found.model_copy(update={"samples": error.samples, "tokens": error.tokens})
    if isinstance(error, RunError):
        return RankOutcome(rank=rank, kind="run", time=now, message=str(error), lost=lost)
    message = f"{type(error).__name__}: {error}"
    return RankOutcome(rank=rank, kind="crash", time=now, message=message, traceback=traceback, lost=lost)


def stranded(rank: int, failed: str) -> RankOutcome:
    """Makes the outcome of a rank that was ended from outside. failed: the rank it waited for."""
    message = f"ended because {failed} failed, which it waited for"
    return RankOutcome(rank=rank, kind="run", time=time.monotonic(), message=message, lost=True)


def _lost_a_peer(error: BaseException | None) -> bool:
    """Returns whether it, or its cause, is an error of the network between ranks."""
    while error is not None:
        if type(error).__module__ == "torch.distributed":  # DistBackendError, DistNetworkError, DistStoreError
            return True
        if isinstance(error, RuntimeError) and _GLOO.search(str(error)):
            return True
        error = error.__cause__
    return False


def cause_of(failures: Sequence[RankOutcome]) -> RankOutcome:
    """Returns the failure that came first; among ranks that failed alike the lowest."""
    first = min(failures, key=lambda outcome: outcome.time)
    alike = [
        each
        for each in failures
        if (each.kind, each.problems, each.message) == (first.kind, first.problems, first.message)
    ]
    return min(alike, key=lambda outcome: outcome.rank)


def raised(outcome: RankOutcome) -> Exception:
    """Returns the rank's failure as an error of this process."""
    if outcome.kind == "user":
        where = f" (on rank {outcome.rank})" if outcome.rank else ""  # the first one sees what all see
        return UserError([Problem(p.field, p.why + where, p.fix) for p in outcome.problems])
    if outcome.kind == "memory":
        return OutOfMemory(f"rank {outcome.rank}: {outcome.message}", outcome.samples, outcome.tokens)
    if outcome.kind == "run":
        return RunError(f"rank {outcome.rank}: {outcome.message}")
    return RankError(f"rank {outcome.rank}: {outcome.message}", outcome.traceback)
