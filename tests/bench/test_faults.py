"""Each fault of the chaos bench really happens, to processes that stand for a run's."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import faults, warm
from bench.chaos_machine import Clock, Disk
from bench.faults import FAULTS
from bench.warm import Nursery, reap
from tests.launch.chaos import children_of, ranks_of

WAITING = "import time; print('there', flush=True); time.sleep(60)"


class Standing:
    """In place of a run: launchers, ranks, and what was printed."""

    def __init__(self, *processes: subprocess.Popen[bytes]) -> None:
        self.processes, self.dice, self.launched = processes, random.Random(0), list[tuple[str, ...]]()
        self.launchers = [process for process in processes if process.args[-1] == "launcher"]  # type: ignore[index]
        self.printed = self.printed_since = ""
        self.disk: Disk | None = None

    def ranks(self, node: int | None = None) -> list[psutil.Process]:
        found = [psutil.Process(process.pid) for process in self.processes if process not in self.launchers]
        return found if node is None else found[node : node + 1]

    def launch(self, *options: str) -> None:
        self.launched.append(options)

    def launch_again(self, node: int) -> None:
        self.launched.append((str(node),))

    @property
    def alive(self) -> list[bool]:
        time.sleep(0.05)
        return [process.poll() is None for process in self.processes]


@pytest.fixture
def run() -> Iterator[Any]:
    """Two nodes of a rank each: two launchers, then two ranks."""
    names = ("launcher", "launcher", "rank", "rank")
    processes = [subprocess.Popen([sys.executable, "-c", WAITING, name], stdout=subprocess.PIPE) for name in names]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    yield Standing(*processes)
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("what", "alive", "launched"),
    [
        ("all ranks", [True, True, False, False], []),
        ("launcher", [False, True, True, True], [("--resume",)]),
        ("other node", [True, False, True, False], [("1",)]),
    ],
)
def test_a_kill_ends_whom_it_should_and_does_next_what_a_user_would(
    run: Any, what: str, alive: list[bool], launched: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "BACK_SECONDS", 0.0)
    victims = FAULTS[what].hit(run, run.ranks())
    assert run.alive == alive
    assert len(victims) == alive.count(False)
    assert FAULTS[what].follow(run, victims)
    assert run.launched == launched


def test_a_kill_of_one_rank_leaves_the_other(run: Any) -> None:
    FAULTS["one rank"].hit(run, run.ranks())
    assert sorted(run.alive) == [False, True, True, True]
    assert run.alive[:2] == [True, True]


def test_the_first_nodes_loss_has_the_others_end_before_all_are_started_again(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "MOST_SECONDS", 0.2)
    FAULTS["first node"].hit(run, run.ranks())
    assert run.alive == [False, True, False, True]
    with pytest.raises(subprocess.TimeoutExpired):
        FAULTS["first node"].follow(run, [])
    run.launchers[1].kill()
    run.printed_since = "The run failed. node 1 could not meet the others"
    assert FAULTS["first node"].follow(run, [])
    assert run.launched == [("--resume",)]


def test_a_rank_that_is_stopped_for_a_while_stands_still_and_goes_on(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "PAUSE_SECONDS", (0.1, 0.2))
    [victim] = FAULTS["stopped for a while"].hit(run, run.ranks())
    assert run.alive == [True] * 4
    assert psutil.Process(victim).status() != psutil.STATUS_STOPPED


def test_a_rank_that_is_stopped_for_good_has_to_be_ended_and_named(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "MOST_SECONDS", 0.2)
    [victim] = FAULTS["stopped for good"].hit(run, run.ranks())
    until = time.monotonic() + 10
    while psutil.Process(victim).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < until
    with pytest.raises(AssertionError, match="is not ended"):
        FAULTS["stopped for good"].follow(run, [victim])
    [process] = [process for process in run.processes if process.pid == victim]
    process.kill()
    process.wait()
    with pytest.raises(AssertionError, match="is not named"):
        FAULTS["stopped for good"].follow(run, [victim])
    run.printed_since = f"rank 1 is stopped by a signal (SIGSTOP): process {victim} on here"
    assert FAULTS["stopped for good"].follow(run, [victim])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        found = Disk(tmp_path / "disk")
    except OSError as error:
        pytest.skip(str(error))
    yield found
    found.close()


def test_a_disk_that_is_filled_takes_no_more_until_it_is_freed(disk: Disk, run: Any) -> None:
    earlier = disk.folder / "earlier"
    earlier.write_bytes(b"x" * 10_000)
    run.disk = disk
    FAULTS["full disk"].hit(run, [])
    with pytest.raises(OSError, match="No space left"):
        (disk.folder / "later").write_bytes(b"x" * 2**20)
    assert earlier.read_bytes() == b"x" * 10_000
    run.launchers[0].kill()
    with pytest.raises(AssertionError, match="exit code -9"):
        FAULTS["full disk"].follow(run, [])
    (disk.folder / "later").write_bytes(b"x" * 2**20)
    disk.empty()
    assert not list(disk.folder.iterdir())


def test_a_full_disk_that_a_run_does_not_name_is_noticed(disk: Disk, run: Any) -> None:
    run.disk, process = disk, subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)", "launcher"])
    run.launchers[0] = process
    run.printed_since = "The run failed. Something is wrong; go on with --resume"
    with pytest.raises(AssertionError, match="it does not say so"):
        FAULTS["full disk"].follow(run, [])
    run.printed_since = "The run failed. events.jsonl cannot be written: No space left on device; go on with --resume"
    assert FAULTS["full disk"].follow(run, [])


JUMPING = """
import sys, threading, time
before = time.time(), time.monotonic()
print("there", flush=True)
sys.stdin.readline()
threading.Event().wait(0.2)
print(time.time() - before[0], time.monotonic() - before[1])
"""


def test_a_clock_jumps_under_a_process_that_runs_and_nothing_waits_longer(tmp_path: Path) -> None:
    try:
        clock = Clock(tmp_path / "clock")
    except OSError as error:
        pytest.skip(str(error))
    words = [sys.executable, "-c", JUMPING]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env={**os.environ, **clock.variables}, **pipes) as process:
        process.stdout.readline()
        clock.set(-86400)
        text, _ = process.communicate("go\n", timeout=30)
    of_day, monotonic = map(float, text.split())
    assert of_day < -86000
    assert 0.2 <= monotonic < 30


# --- warm starts -----------------------------------------------------------------------------------------------------


def test_a_forked_process_is_its_askers_child_with_folder_output_and_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "IMPORTED", ("json",))
    nursery = Nursery(os.environ)
    try:
        with (tmp_path / "log").open("wb") as log:
            refused = nursery.launcher(["train", "no.yaml", "--quiet"], tmp_path, {**os.environ, "A": "1"}, log)
        assert refused.pid in children_of(os.getpid())
        assert refused.wait(60) == 2
        assert "no.yaml" in (tmp_path / "log").read_text()
        with (tmp_path / "log").open("wb") as log:
            killed = nursery.launcher(["train", "no.yaml"], tmp_path, os.environ, log)
        killed.kill()
        assert killed.wait(10) == -9
        assert ranks_of(killed.pid) == []
    finally:
        nursery.close()
        reap([])
