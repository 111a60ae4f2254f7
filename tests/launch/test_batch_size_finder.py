"""Tests how `micro_batch_size: auto` is found over attempts whose processes may end for want of memory, without
processes: an attempt is a function here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config.load import load as load_run
from drivetrain.errors import OutOfMemory, RankError
from drivetrain.launch import batch_size_finder
from drivetrain.launch.batch_size_finder import fitted
from drivetrain.launch.elastic import Died, Hung
from drivetrain.launch.job import Job, Node, Result
from drivetrain.launch.rendezvous import Meeting
from drivetrain.training.batch_size_trials import Tried, sizes
from tests.launch.test_start import prepared


class Met(Meeting):
    """A meeting of one node that remembers what the others would hear."""

    def __init__(self, task: Job) -> None:
        super().__init__(task.run, Node())
        self.heard: list[str] = []

    def part(self) -> None:
        self.heard.append("next")

    def give_up(self) -> None:
        self.heard.append("over")


class Attempts:
    """Makes the attempts of ranks that have room for some samples, and end with an error at more."""

    def __init__(self, room: int, error: Callable[[], BaseException]) -> None:
        self.room, self.error, self.trials = room, error, list[list[int]]()

    def __call__(self, search: Job, folder: Path, *_: Any) -> Result:
        assert search.verb == "fit"
        self.trials.append([])
        tried, possible = Tried.read(folder), sizes(search.run)
        while (size := tried.next(possible)) is not None:
            self.trials[-1].append(size)
            tried.trying = size
            tried.write(folder)
            if size > self.room:
                raise self.error()
            tried.fit, tried.trying = [*tried.fit, size], None
            tried.write(folder)
        return Result(code=0, value={})


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.chdir(prepared(tmp_path))
    run, problems = load_run(tmp_path / "run.yaml", ["engine=ddp", "processes=2", "micro_batch_size=auto"])
    assert run is not None
    assert not problems
    return Job(verb="train", run=run, notices=["before"], quiet=True)


@pytest.mark.parametrize("error", [lambda: OutOfMemory("no room", samples=4), lambda: Died("ended by SIGKILL")])
@pytest.mark.parametrize(
    ("room", "trials", "size", "words"),
    [  # of the four samples of a device
        (9, [[1, 2, 4]], 4, "micro_batch_size is 4: of the longest samples 1, 2, 4 fit"),
        (3, [[1, 2, 4]], 2, "micro_batch_size is 2: of the longest samples 1, 2 fit, 4 does not"),
        (1, [[1, 2]], 1, "micro_batch_size is 1: of the longest samples 1 fits, 2 does not"),
    ],
)
def test_the_largest_size_is_the_runs_though_processes_end_above_it(
    task: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Any,
    room: int,
    trials: list[list[int]],
    size: int,
    words: str,
) -> None:
    attempts, meeting = Attempts(room, error), Met(task)
    monkeypatch.setattr(batch_size_finder, "one_attempt", attempts)
    found = fitted(task, tmp_path, meeting)
    assert (found.verb, found.run.micro_batch_size, found.notices) == ("train", size, ["before", words])
    assert attempts.trials == trials
    assert meeting.heard == ["next"]


def test_after_an_end_the_sizes_between_are_tried_by_new_processes(
    task: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = task.model_copy(update={"run": task.run.model_copy(update={"processes": 1})})
    attempts, meeting = Attempts(3, lambda: Died("ended by SIGKILL")), Met(alone)
    monkeypatch.setattr(batch_size_finder, "one_attempt", attempts)
    assert fitted(alone, tmp_path, meeting).run.micro_batch_size == 3
    assert attempts.trials == [[1, 2, 4], [3]]
    assert meeting.heard == ["next", "next"]


@pytest.mark.parametrize(
    ("room", "error"),
    [
        (0, OutOfMemory("no room", samples=1)),
        (0, Died("ended by SIGKILL")),
        (3, Hung("a hang")),
        (3, RankError("a bug")),
    ],
)
def test_what_smaller_sizes_do_not_help_ends_the_search_on_all_nodes(
    task: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, error: BaseException
) -> None:
    meeting = Met(task)
    monkeypatch.setattr(batch_size_finder, "one_attempt", Attempts(room, lambda: error))
    with pytest.raises(type(error)) as raised:
        fitted(task, tmp_path, meeting)
    assert raised.value is error
    assert meeting.heard == ["over"]


def test_a_death_before_any_trial_is_no_matter_of_sizes(
    task: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: Any) -> Result:
        raise Died("ended while importing")

    monkeypatch.setattr(batch_size_finder, "one_attempt", dies)
    with pytest.raises(Died, match="while importing"):
        fitted(task, tmp_path, Met(task))


def test_a_verb_that_does_not_train_searches_nothing(
    task: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = Attempts(9, AssertionError)
    monkeypatch.setattr(batch_size_finder, "one_attempt", attempts)
    assert fitted(task.model_copy(update={"verb": "evaluate"}), tmp_path, Met(task)).run.micro_batch_size is None
    assert not attempts.trials
