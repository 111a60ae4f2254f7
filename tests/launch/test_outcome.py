"""Tests what a rank leaves of its end, and how its failure reads to the user."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from drivetrain.errors import OutOfMemory, RankError, RunError, problem
from drivetrain.launch.elastic import Died, Killed, result_of
from drivetrain.launch.job import Result
from drivetrain.launch.outcome import cause_of, done, failed, outcomes, raised
from drivetrain.runtime.heartbeat import Pulse

REFUSED, FULL = problem("data.train", "no such folder", "give one"), OutOfMemory("no room", samples=8, tokens=2048)


@pytest.mark.parametrize("error", [REFUSED, RunError("a NaN"), FULL, KeyError()])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_failure_goes_through_the_file_and_names_its_rank(tmp_path: Path, error: Exception, rank: int) -> None:
    failed(rank, error, "Traceback").write(tmp_path)
    (outcome,) = outcomes(tmp_path)
    again = raised(outcome)
    assert type(again) is (RankError if isinstance(error, KeyError) else type(error))
    assert vars(again).get("samples") == vars(error).get("samples")
    assert vars(again).get("tokens") == vars(error).get("tokens")
    is_first_users = rank == 0 and not isinstance(error, KeyError | RunError)
    assert (f"rank {rank}" in str(again)) is not is_first_users, "what the first rank is told, all are"


def test_a_result_keeps_numbers_that_are_not_finite(tmp_path: Path) -> None:
    done(0, Result(code=0, value={"losses": [1.5, math.nan, -math.inf]})).write(tmp_path)
    (outcome,) = outcomes(tmp_path)
    assert outcome.result is not None
    assert repr(outcome.result.value["losses"]) == "[1.5, nan, -inf]"


def test_the_first_failure_is_the_cause_and_what_all_saw_is_the_first_ranks() -> None:
    one, other = problem("data.train", "no such folder", "give one"), RunError("the others are gone")
    earlier, *failures = [failed(rank, error, "") for rank, error in ((1, other), (1, one), (2, other), (0, one))]
    assert cause_of(failures).rank == 0
    assert str(raised(cause_of(failures))) == str(one)
    assert cause_of([*failures, earlier]).rank == 1, "the lowest that failed as the first one did"


def test_a_clock_that_is_set_back_does_not_change_which_failure_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    first = failed(1, RunError("the cause"), "")
    before = time.time() - 3600
    monkeypatch.setattr(time, "time", lambda: before)
    assert cause_of([first, failed(0, RunError("what came of it"), "")]).rank == 1


GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8094")
JOINING = RunError("rank 1 could not join")
JOINING.__cause__ = dist.DistNetworkError("timed out")


@pytest.mark.parametrize("error", [GLOO, dist.DistBackendError("NCCL error: remote process exited"), JOINING])
def test_an_error_of_the_network_between_ranks_means_that_a_peer_was_lost(tmp_path: Path, error: Exception) -> None:
    failed(0, error, "Traceback").write(tmp_path)
    with pytest.raises(Died):
        result_of(tmp_path, {})


@pytest.mark.parametrize("error", [ValueError("broken"), RuntimeError("shapes differ"), RunError("a NaN")])
def test_a_ranks_own_error_is_no_death(tmp_path: Path, error: Exception) -> None:
    failed(0, error, "Traceback").write(tmp_path)
    failed(1, GLOO, "Traceback").write(tmp_path)
    with pytest.raises(RankError if not isinstance(error, RunError) else RunError) as raised:
        result_of(tmp_path, {})
    assert not isinstance(raised.value, Died)
    assert str(error) in str(raised.value)


@pytest.mark.parametrize(("seconds_after", "is_death"), [(-5, True), (30, False)])
def test_what_ended_first_is_reported(tmp_path: Path, seconds_after: int, is_death: bool) -> None:
    """A rank that was killed brings others down; one that hangs is killed after another's error."""
    failed(0, ValueError("broken"), "Traceback").write(tmp_path)
    killed = SimpleNamespace(exitcode=-9, timestamp=int(time.time()) + seconds_after)
    failure: Any = SimpleNamespace(failures={1: killed})
    with pytest.raises(RankError) as raised:
        result_of(tmp_path, failure.failures)
    assert isinstance(raised.value, Died) is is_death
    assert ("rank 1 was ended by SIGKILL" if is_death else "ValueError: broken") in str(raised.value)


def test_a_kill_that_the_kernel_may_have_sent_is_reported_with_the_ranks_last_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = {rank: Pulse(1000 + rank, rank, 9, 0.0, 7, 12, "backward", (), 0, (rank + 1) * 2**29) for rank in (0, 1)}
    monkeypatch.setattr("drivetrain.launch.elastic.pulses", lambda _: last)
    failure: Any = SimpleNamespace(failures={1: SimpleNamespace(exitcode=-9, timestamp=int(time.time()))})
    with pytest.raises(Killed) as raised:
        result_of(tmp_path, failure.failures)
    assert str(raised.value).startswith("rank 1 was ended by SIGKILL in step 12 (backward)")
    likely = "(most likely by the kernel, because the machine's memory ran out; last resident size: 1.0 GiB)"
    assert likely in str(raised.value)
