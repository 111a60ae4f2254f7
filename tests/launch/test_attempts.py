"""Tests how often a run is started, and what each start knows of those before it, without starting any."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.launcher.api as torch_launcher
from torch.distributed.launcher.api import LaunchConfig

from drivetrain.config.load import load as load_run
from drivetrain.errors import OutOfMemory, RankError, RunError
from drivetrain.launch import elastic, restarts
from drivetrain.launch.elastic import Died, one_attempt
from drivetrain.launch.job import Job, Node, Result
from drivetrain.launch.outcome import done, failed
from drivetrain.launch.rendezvous import LAST_CALL_SECONDS, Meeting
from drivetrain.launch.start import start
from drivetrain.runtime.attempt import Attempt
from tests.launch.test_start import free_port, prepared
from tests.runtime.test_scratch import dead


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    monkeypatch.chdir(prepared(tmp_path))

    def of(*changes: str) -> Job:
        run, problems = load_run(tmp_path / "run.yaml", ["engine=ddp", "processes=2", *changes])
        assert run is not None
        assert not problems
        return Job(verb="train", run=run, quiet=True)

    return of


class Starts:
    """What each start would read, and how it ends."""

    def __init__(self, ends: Any) -> None:
        self.ends, self.attempts, self.elapsed = ends, list[Attempt](), list[float]()

    def __call__(self, task: Job, folder: Path, *_: Any) -> Result:
        del task
        self.attempts.append(Attempt.read(folder))
        self.elapsed.append(self.attempts[-1].elapsed_before(10.0 * len(self.attempts)))
        end = next(self.ends)
        if isinstance(end, BaseException):
            raise end
        assert isinstance(end, Result)
        return end


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_run_that_always_dies_is_started_once_more_than_it_may_be_restarted(
    task: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    starts = Starts(Died(f"death {number}") for number in range(1, 20))
    monkeypatch.setattr(restarts, "one_attempt", starts)
    with pytest.raises(RankError) as raised:
        start(task(f"max_restarts={most}"))
    assert len(starts.attempts) == most + 1
    before = [f"death {number}" for number in range(1, most + 1)]
    assert [list(attempt.restarts) for attempt in starts.attempts] == [before[:count] for count in range(most + 1)]
    reported = [attempt.notices for attempt in starts.attempts]
    assert reported == [[], *([f"restart {n} of at most {most}: death {n}"] for n in range(1, most + 1))]
    assert len({attempt.since for attempt in starts.attempts}) == 1, "the launch began once"
    assert starts.elapsed == [10.0] * (most + 1), "time since the launch began, not since the newest start"
    last = str(raised.value)
    assert last.startswith(f"death {most + 1}")
    assert (f"started {most + 1} times, as max_restarts={most} allows" in last) == (most > 0)


def test_a_start_with_smaller_micro_batches_is_no_restart(
    task: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [OutOfMemory("no room", 4), Died("death 1"), OutOfMemory("no room", 2), Result(code=0, value={})]
    starts = Starts(iter(ends))
    monkeypatch.setattr(restarts, "one_attempt", starts)
    assert start(task("max_restarts=1")).code == 0
    assert [list(attempt.restarts) for attempt in starts.attempts] == [[], [], ["death 1"], ["death 1"]]


def test_a_start_with_smaller_micro_batches_halves_the_bound_that_the_ranks_had_by_default(
    task: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [OutOfMemory("no room", 4, 2048), OutOfMemory("no room", 2, 1024), Result(code=0, value={})]
    starts = Starts(iter(ends))
    monkeypatch.setattr(restarts, "one_attempt", starts)
    assert start(task()).code == 0
    given, *smaller = [attempt.reduction for attempt in starts.attempts]
    assert given is None
    assert [each["to"] for each in smaller if each] == [
        {"micro_batch_size": 2, "micro_batch_tokens": 1024},
        {"micro_batch_size": 1, "micro_batch_tokens": 512},
    ]


class Launched:
    """Stands for torch's launcher: what it was asked for, and what its ranks leave in the launch's folder."""

    def __init__(self, *ranks: Callable[[Path], None]) -> None:
        self.configs, self._ranks = list[LaunchConfig](), iter(ranks)

    def __call__(self, config: LaunchConfig, _: str) -> Callable[..., None]:
        self.configs.append(config)
        return lambda *words: next(self._ranks)(Path(words[2]))


def test_torch_restarts_nothing_by_itself_and_each_attempt_forgets_the_one_before(
    task: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch's own restarts would be counted by no one, and go on after a mistake."""

    def crash(folder: Path) -> None:
        done(0, Result(code=0, value="first")).write(folder)
        failed(1, ValueError("this one broke"), "").write(folder)

    def smaller(folder: Path) -> None:
        done(0, Result(code=0, value="second")).write(folder)

    launched = Launched(crash, smaller)
    monkeypatch.setattr(torch_launcher, "elastic_launch", launched)
    job = task("max_restarts=3")
    meeting, folder = Meeting(job.run, Node()), tmp_path / "launch"
    folder.mkdir()
    with pytest.raises(RankError, match="rank 1: ValueError: this one broke"):
        one_attempt(job, folder, meeting, 2)
    assert one_attempt(job, folder, meeting, 1).value == "second", "rank 1 is not there this time"
    assert [config.max_restarts for config in launched.configs] == [0, 0]
    assert [config.nproc_per_node for config in launched.configs] == [2, 1]
    assert len({config.run_id for config in launched.configs}) == 2, "each attempt meets on its own"


def test_nodes_count_an_attempt_once_and_wait_less_for_those_that_were_lost(
    task: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.launch.rendezvous.SETTLING_SECONDS", 0)
    run, where = task("nodes=2", "min_nodes=1").run, f"127.0.0.1:{free_port()}"
    nodes = [Meeting(run, Node(rank, where)) for rank in range(2)]
    seen = []
    for _ in range(3):
        seen.append(
            [(node.settings()["run_id"], node.settings()["rdzv_configs"]["last_call_timeout"]) for node in nodes]
        )
        assert nodes[0].progress(7) == 7, "and none of the attempt before"
        assert nodes[1].progress(5) == 12
        assert nodes[0].progress(8) == 13, "the sum of what each has counted by now"
        assert nodes[1].failure() == nodes[1].hang() == "", "of the attempt before"
        nodes[1].tell_hang("rank 1 is stopped")
        nodes[0].tell_hang("a reason that came later")
        assert nodes[0].hang() == "rank 1 is stopped"
        assert nodes[1].rows("rows of 1", 0) == []
        assert nodes[0].rows("rows of 0", 0) == ["rows of 1"]
        nodes[0].tell_failure("rank 1")
        soon(lambda: nodes[1].failure() == "rank 1")
        nodes[0].try_smaller()
        soon(nodes[1].tries_smaller)
        for node in nodes:
            node.part()
        assert not nodes[1].tries_smaller(), "of the attempt before"
    first, later = LAST_CALL_SECONDS
    assert seen == [[(f"{run.name}-{number}", later if number else first)] * 2 for number in range(3)]
    assert Meeting(run, Node(1, where)).settings()["run_id"] == f"{run.name}-3", "a node that comes back"


def soon(holds: Callable[[], bool]) -> None:
    """Returns what one node writes another one reads a moment later."""
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_rank_that_dies_in_silence_is_a_death(task: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_launcher, "elastic_launch", Launched(lambda _: None, lambda _: None))
    monkeypatch.setattr(restarts, "devices_left", lambda _: 2)
    counted = []
    real = elastic.one_attempt

    def attempts(*given: Any) -> Result:
        counted.append(Attempt.read(given[1]).restarts)
        return real(*given)

    monkeypatch.setattr(restarts, "one_attempt", attempts)
    with pytest.raises(RankError, match=r"no rank reported how it ended.*started 2 times, as max_restarts=1 allows"):
        start(task("max_restarts=1"))
    assert [len(causes) for causes in counted] == [0, 1]


def test_what_dead_launches_left_in_the_temporary_folder_goes_with_the_next_launch(
    task: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    left = dead(place)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    seen = []

    def attempt(_: Job, folder: Path, *__: Any) -> Result:
        seen.append([folder.parent, left.exists(), folder.exists()])
        return Result(code=0, value={})

    monkeypatch.setattr(restarts, "one_attempt", attempt)
    assert start(task()).code == 0
    assert seen == [[place, False, True]]
    assert list(place.iterdir()) == []


def test_a_temporary_folder_that_cannot_be_written_is_reported(
    task: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "workload.py"))
    with pytest.raises(RunError, match=r"the temporary folder cannot be written: Not a directory; .*then start again"):
        start(task())
