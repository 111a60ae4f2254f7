"""Ranks that die are started again from the newest good checkpoint, on fewer machines if need be; mistakes are not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain.config.load import load as load_run
from drivetrain.errors import OutOfMemory, RankError, RunError, UserError
from drivetrain.launch import restarts
from drivetrain.launch.elastic import Died, Killed
from drivetrain.launch.job import Job, Node, Result
from drivetrain.launch.rendezvous import Meeting
from drivetrain.launch.start import start
from drivetrain.tracking.jsonl import read_events
from tests.launch.chaos import killed, ranks_of, same_end
from tests.launch.history import VARIABLE, check_each_once, surviving
from tests.launch.test_start import command, finished, free_port, losses, prepared, report, wait_for_step

ROOT = Path(__file__).resolve().parents[2]
RECORDING = f"""
if "{VARIABLE}" in os.environ:
    from tests.launch.history import record_if_asked
    record_if_asked()
"""
LONG = ("run.yaml", "loop.steps=60", "evaluation.every_steps=30", "checkpoints.every_steps=4")


@pytest.fixture(scope="module")
def slowly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of sixty steps that takes some seconds; undisturbed it is in the folder `whole`."""
    folder = prepared(tmp_path_factory.mktemp("slowly"), "time.sleep(0.05)")
    with (folder / "workload.py").open("a") as file:
        file.write(RECORDING)
    finished(folder, "train", *LONG, "engine=ddp", "processes=2", "output=whole")
    return folder


# the loss of a node, below, restarts from a checkpoint always; that a run goes on to the same bits is test_resume.py's
@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 2])
def test_a_run_whose_ranks_are_killed_at_random_ends_with_the_same_bits_and_samples(
    kills: int, slowly: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    samples, output = slowly / f"samples-{kills}", slowly / f"killed-{kills}"
    monkeypatch.setenv(VARIABLE, str(samples))
    spread = (*LONG, "engine=ddp", "processes=2")
    ended = killed(slowly, (*spread, "max_restarts=2"), Path(output.name), kills=kills, dice=random.Random(0))
    assert ended.code == 0, ended.words
    assert len(ended.moments) == kills
    same_end(slowly / "whole", output)
    check_each_once(surviving(samples), 60, 44)
    reported = report(output)
    assert len(reported["restarts"]) == kills
    assert all("SIGKILL" in cause for cause in reported["restarts"]), reported["restarts"]
    assert 0 < reported["effective_share"] < 1
    started = [e["first_step"] for e in read_events(output / "events.jsonl") if e["event"] == "run_started"]
    assert all(step % 4 == 0 for step in started), "each goes on from a checkpoint"
    assert started[-1] > 0


@pytest.mark.slow
def test_a_run_of_one_process_is_killed_more_often_than_it_may_and_ends_with_the_history(slowly: Path) -> None:
    ended = killed(slowly, (*LONG, "max_restarts=1"), Path("alone"), kills=2, dice=random.Random(1))
    assert ended.code == 1
    described = " ".join(ended.words.split())
    assert "restart 1 of at most 1: rank 0 was ended by SIGKILL" in described
    assert "started 2 times, as max_restarts=1 allows; before: 1. rank 0 was ended by SIGKILL" in described


class Attempts:
    """What each attempt comes to, instead of one that is really made."""

    def __init__(self, *ends: BaseException | Result) -> None:
        self.ends, self.processes = list(ends), list[int]()

    def __call__(self, *given: Any) -> Result:
        self.processes.append(given[-1])
        end = self.ends.pop(0)
        if isinstance(end, BaseException):
            raise end
        return end


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.chdir(prepared(tmp_path))
    run, problems = load_run(tmp_path / "run.yaml", ["engine=ddp", "processes=2", "max_restarts=3"])
    assert run is not None
    assert not problems
    return Job(verb="train", run=run, quiet=True)


@pytest.mark.parametrize("error", [UserError, RunError, RankError, KeyboardInterrupt])
def test_what_would_only_come_again_is_not_tried_again(task: Job, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    mistake = error([None]) if error is UserError else error("a mistake")
    attempts = Attempts(mistake)
    monkeypatch.setattr(restarts, "one_attempt", attempts)
    with pytest.raises(error) as raised:
        start(task)
    assert raised.value is mistake
    assert len(attempts.processes) == 1


def test_a_rank_that_the_kernel_ended_for_want_of_memory_is_reported_with_what_to_try(
    task: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [Killed(f"rank {rank} was ended by SIGKILL") for rank in range(3)]
    monkeypatch.setattr(restarts, "one_attempt", Attempts(*ends))
    never, once = (task.model_copy(update={"run": task.run.model_copy(update={"max_restarts": n})}) for n in (0, 1))
    advice = r"was ended by SIGKILL\. Try fewer processes, engine\.meta=true with engine=fsdp, "
    with pytest.raises(Killed, match=f"^rank 0 {advice}"):
        start(never)
    with pytest.raises(RankError, match=f"^rank 2 {advice}.*started 2 times.*before: 1. rank 1 was ended by SIGKILL$"):
        start(once)


def test_only_trainings_are_restarted(task: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Attempts(Died("killed"))
    monkeypatch.setattr(restarts, "one_attempt", attempts)
    with pytest.raises(RankError, match=r"^killed$"):
        start(task.model_copy(update={"verb": "evaluate"}))


def test_a_restart_takes_the_devices_that_are_left(task: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Attempts(Died("killed"), Died("killed"), Result(code=0, value={}))
    left = iter([2, 1])
    monkeypatch.setattr(restarts, "one_attempt", attempts)
    monkeypatch.setattr(restarts, "devices_left", lambda _: next(left))
    assert start(task).code == 0
    assert attempts.processes == [2, 2, 1]


def test_without_a_device_there_is_no_restart(task: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "one_attempt", Attempts(Died("killed")))
    monkeypatch.setattr(restarts, "devices_left", lambda _: 0)
    with pytest.raises(RankError, match="killed; and no device is left"):
        start(task)


@pytest.mark.long
def test_a_node_that_is_lost_is_done_without_on_the_same_curve(slowly: Path) -> None:
    """Two launching processes stand for two machines; all of one is killed, and the other goes on alone."""
    meeting = ("--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}")
    settings = ("engine=ddp", "processes=1", "min_nodes=1", "max_restarts=1", "output=lost")
    nodes = [
        subprocess.Popen(
            command("train", *LONG, *settings, *meeting, "--node-rank", str(rank)),
            cwd=slowly, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        wait_for_step(slowly / "lost" / "events.jsonl", 9)
        for process in [psutil.Process(nodes[1].pid), *ranks_of(nodes[1].pid)]:
            os.kill(process.pid, signal.SIGKILL)
        described, _ = nodes[0].communicate(timeout=240)
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
    assert nodes[0].returncode == 0, described
    assert losses(slowly / "lost") == pytest.approx(losses(slowly / "whole"), rel=1e-5)
    reported = report(slowly / "lost")
    assert reported["engaged"]["world_size"] == 1
    assert len(reported["restarts"]) == 1
    assert "1 of 2 ranks are there; the global batch stays 8" in " ".join(described.split())


def test_a_rendezvous_without_a_store_is_reported_with_its_port(task: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.launch.rendezvous.JOIN_SECONDS", 2)
    where = f"127.0.0.1:{free_port()}"
    two = task.run.model_copy(update={"nodes": 2})
    with pytest.raises(RunError, match=f"node 1 could not meet the others at {where}.*node 0 is running.*firewall"):
        Meeting(two, Node(1, where))


def test_a_node_hears_that_another_has_ended_the_run(task: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.launch.rendezvous.SETTLING_SECONDS", 0)
    two, where = task.run.model_copy(update={"nodes": 2}), f"127.0.0.1:{free_port()}"
    first, second = Meeting(two, Node(0, where)), Meeting(two, Node(1, where))
    first.part()
    assert first.settings()["run_id"] != second.settings()["run_id"]
    second.part()
    assert first.settings()["run_id"] == second.settings()["run_id"], "they meet for the same attempt"
    second.give_up()
    with pytest.raises(RankError, match="another node ended the run"):
        first.part()


@pytest.mark.slow
def test_a_node_that_comes_back_is_taken_in_again(slowly: Path) -> None:
    """The one that was there saves, and both go on from there as one."""
    meeting = ("--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}")
    long = ("loop.steps=600", "evaluation.every_steps=600", "engine=ddp", "processes=1")
    settings = (*LONG, *long, "min_nodes=1", "max_restarts=1", "output=back")

    def node(rank: int) -> subprocess.Popen[str]:
        words = command("train", *settings, *meeting, "--node-rank", str(rank))
        return subprocess.Popen(words, cwd=slowly, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    nodes = [node(0), node(1)]
    try:
        wait_for_step(slowly / "back" / "events.jsonl", 9)
        for process in [psutil.Process(nodes[1].pid), *ranks_of(nodes[1].pid)]:
            os.kill(process.pid, signal.SIGKILL)
        nodes[1].communicate()
        nodes[1] = node(1)
        described = [each.communicate(timeout=500)[0] for each in nodes]
    finally:
        for each in nodes:
            each.kill()
    assert [each.returncode for each in nodes] == [0, 0], described
    assert report(slowly / "back")["engaged"]["world_size"] == 2
    assert sorted(losses(slowly / "back")) == [*range(1, 601)], "each step once"


@pytest.mark.parametrize(("rank", "least", "ends"), [(1, None, True), (1, 1, False), (0, 1, True)])
def test_a_node_without_a_device_ends_the_run_unless_the_others_may_go_on(
    rank: int, least: int | None, ends: bool, task: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = task.run.model_copy(update={"nodes": 2, "min_nodes": least})
    heard: list[str] = []
    meeting = Meeting(task.run, Node(rank))
    meeting._run = two
    monkeypatch.setattr(meeting, "part", lambda: heard.append("next"))
    monkeypatch.setattr(meeting, "give_up", lambda: heard.append("over"))
    monkeypatch.setattr(restarts, "one_attempt", Attempts(OutOfMemory("too little", samples=8)))
    monkeypatch.setattr(restarts, "devices_left", lambda _: 0)
    with pytest.raises(RankError, match="no device is left on this machine"):
        restarts._until_done(task.model_copy(update={"run": two}), tmp_path, meeting, restarts.Here())
    assert heard == ["next", "over"] if ends else ["next"]
