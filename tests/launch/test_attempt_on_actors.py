"""An attempt whose ranks are held elsewhere, with holders in this process in place of a cluster's actors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.config.load import load
from drivetrain.errors import RankError
from drivetrain.launch.attempt_on_actors import AttemptOnActors, Member
from drivetrain.launch.elastic import Died
from drivetrain.launch.job import Job
from drivetrain.launch.rank import TASK
from drivetrain.launch.rank_process import RankProcess
from drivetrain.runtime.attempt import Attempt
from tests.launch.test_start import prepared

ON_RANK_1 = """pass
            if os.environ.get("RANK") == "1" and Model.steps == 4:
                {}"""


class Holder:
    """Answers calls as a handle of an actor does, at once. lost: from then on every call fails."""

    def __init__(self) -> None:
        self.held, self.lost = RankProcess(), False

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            return RankError("it does not answer") if self.lost else getattr(self.held, name)(*given)

        return SimpleNamespace(remote=call)


@pytest.fixture
def holders() -> Iterator[list[Holder]]:
    with ExitStack() as stack:
        found = [Holder(), Holder()]
        for each in found:
            stack.callback(each.held.close)
        yield found


def attempt(folder: Path, holders: list[Holder], kept: dict[str, str], hook: str) -> AttemptOnActors:
    prepared(folder, hook)
    run, problems = load(folder / "run.yaml", ["engine=ddp", "processes=2", "device=cpu"])
    assert run is not None, problems
    job = Job(verb="train", run=run.model_copy(update={"output": str(folder / "run"), "processes": 2}))
    own = folder / "launch"
    own.mkdir()
    (own / TASK).write_text(job.model_dump_json())
    Attempt(folder=own).write()
    members = [Member(rank, rank, 2, "127.0.0.1", holder) for rank, holder in enumerate(holders)]
    return AttemptOnActors(job, own, members, list, kept)


def test_a_ranks_own_error_comes_back_with_its_rank(
    tmp_path: Path, holders: list[Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kept: dict[str, str] = {}
    made = attempt(tmp_path, holders, kept, ON_RANK_1.format("raise ValueError('this one broke')"))
    with pytest.raises(RankError, match="rank 1: ValueError: this one broke") as raised:
        made.run()
    assert not isinstance(raised.value, Died), "it would come again"
    assert json.loads(kept["elapsed.json"]) >= 0
    assert "prepared" in kept, "the next attempt goes on in the run's folder"


def test_a_rank_that_is_killed_is_a_death(
    tmp_path: Path, holders: list[Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = attempt(tmp_path, holders, {}, ON_RANK_1.format("os.kill(os.getpid(), 9)"))
    with pytest.raises(Died, match="rank 1 was ended by SIGKILL in step 2"):
        made.run()


def test_a_holder_that_no_longer_answers_is_a_death(
    tmp_path: Path, holders: list[Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = attempt(tmp_path, holders, {}, "time.sleep(600)")
    monkeypatch.setattr(AttemptOnActors, "_pass_on", lambda *_: setattr(holders[1], "lost", True))
    with pytest.raises(Died, match=r"rank 1 was lost with an actor or machine, 127\.0\.0\.1: it does not answer"):
        made.run()
