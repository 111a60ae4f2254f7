"""Ranks that do not go on are named, with where each waits; those that wait for one that works are left alone."""

from __future__ import annotations

import functools
import json
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from drivetrain.config.load import load as load_run
from drivetrain.launch.diagnostics import stack_request
from drivetrain.launch.diagnostics.hang_report import Row, State, blame, in_full, last_sizes, table
from drivetrain.launch.diagnostics.process_state import PendingCollective, Standing, standing, waits_on_gpu
from drivetrain.launch.diagnostics.stack_request import Alone, ask, pulse_file, pulses
from drivetrain.launch.diagnostics.stillness import Stillness
from drivetrain.launch.diagnostics.watchdog import Watch
from drivetrain.launch.job import Node
from drivetrain.launch.rendezvous import Meeting
from drivetrain.runtime.heartbeat import Heart, Pulse
from tests.launch.test_start import command, free_port, prepared
from tests.ranks import RankPool

HANGING = """
            if os.environ.get("RANK") == "1" and Model.steps == 4:
                todo = sorted(os.listdir("todo"))
                if todo:
                    os.rename(f"todo/{todo[0]}", f"done-{todo[0]}")
                    exec(open(f"done-{todo[0]}").read())"""
WAYS = {
    "1-stopped": "import signal; os.kill(os.getpid(), signal.SIGSTOP)",
    # it goes on to the next collective, where it waits for rank 0, which waits in this one
    "2-skipped": "open('skipped', 'w').close()",
    "3-silent": "os._exit(0)",
}
SKIPPED = """
            if os.environ.get("RANK") == "0" and Model.steps == 4:
                time.sleep(0.5)
                if os.path.exists("skipped"):
                    os.remove("skipped")
                    torch.distributed.all_reduce(torch.zeros(3), group=apart)"""


@pytest.mark.long
def test_a_rank_that_is_stopped_is_named_where_it_stands(tmp_path: Path) -> None:
    folder = prepared(tmp_path, f"pass{HANGING}")
    (folder / "todo").mkdir()
    (folder / "todo" / "1-stopped").write_text(WAYS["1-stopped"])
    words = command("train", "run.yaml", "engine=ddp", "processes=2", "hang_seconds=4", "output=run")
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    described = " ".join(done.stderr.split())
    assert "rank 1 is stopped by a signal (SIGSTOP): process " in described
    assert "in step 2, forward" in described
    assert "workload.py:" in described, "the frame that it was stopped in"
    [kept] = (folder / "run" / "hangs").iterdir()
    assert "stopped (T)" in kept.read_text()
    assert "in forward_backward" in kept.read_text(), "the stack of the one that waits"


@pytest.mark.slow
def test_three_ways_to_hang_are_named_and_each_is_a_death_like_another(tmp_path: Path) -> None:
    """Three starts of two ranks: one astray in each, after which nothing is left to try."""
    folder = prepared(tmp_path, f"pass{HANGING}{SKIPPED}")
    file = folder / "workload.py"
    file.write_text(
        file.read_text().replace(
            "def build_model():",
            "def build_model():\n    global apart\n    apart = torch.distributed.new_group()\n"
            "    torch.distributed.all_reduce(torch.zeros(3), group=apart)",
        )
    )
    (folder / "todo").mkdir()
    for name, way in WAYS.items():
        (folder / "todo" / name).write_text(way)
    words = command("train", "run.yaml", "engine=ddp", "processes=2", "hang_seconds=6", "max_restarts=2", "output=run")
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    silent, stopped, skipped = re.split(
        r"before: 1\. |; 2\. hang: ", " ".join(done.stderr.split()).partition("The run failed.")[2]
    )
    assert "rank 1 is stopped by a signal (SIGSTOP): process " in stopped
    assert "in step 2, forward" in stopped
    assert "workload.py:" in stopped, "the frame that it was stopped in"
    assert "in step 2, forward in all_reduce of 3 Float, number 2 of group" in skipped
    assert "in step 2, backward in all_reduce of 212 Float" in skipped, "where the rank went that left it out"
    assert "rank 1 ended without an error" in silent
    assert "in step 2 (forward)" in silent
    assert "It was started 3 times" in silent
    first, second = sorted((folder / "run" / "hangs").iterdir())
    assert "stopped (T)" in first.read_text()
    assert "in forward_backward" in second.read_text(), "stacks"
    assert done.stderr.count("samples of the") == 2, "a table each"


BUSY_THEN_STOPPED = """
            if os.environ.get("RANK") == "0" and Model.steps == 2:
                until = time.monotonic() + 20
                while time.monotonic() < until:
                    sum(range(1000))
            if os.environ.get("RANK") == "1" and Model.steps == 12:
                os.kill(os.getpid(), 19)"""


@pytest.mark.slow
def test_a_machine_waits_for_a_rank_that_works_on_another_and_tells_of_all_that_hang(tmp_path: Path) -> None:
    folder = prepared(tmp_path, f"pass{BUSY_THEN_STOPPED}")
    meeting = ("--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}")
    words = command(
        "train", "run.yaml", "engine=ddp", "processes=1", "hang_seconds=8", "output=run", *meeting, "loop.steps=99"
    )
    nodes = [
        subprocess.Popen(
            [*words, "--node-rank", str(rank)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    described = [" ".join(node.communicate(timeout=300)[0].split()) for node in nodes]
    for node, text in zip(nodes, described, strict=True):
        assert node.returncode == 1, text
        assert "rank 1 is stopped by a signal (SIGSTOP)" in text
        assert "0 │" in text, "the row of the rank on the other machine"
    [kept] = (folder / "run" / "hangs").iterdir()
    assert kept.read_text().count("thread MainThread") == 1, "the stack of the one that waits came from its machine"
    assert "in step 10, forward" in kept.read_text()


def test_a_standstill_is_reported_before_it_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.launch.diagnostics.watchdog.ask", lambda *_: {})
    run, problems = load_run(prepared(tmp_path) / "run.yaml", [f"output={tmp_path / 'run'}", "hang_seconds=60"])
    assert run is not None, problems
    watch, heart = Watch(tmp_path, run, Meeting(run, Node())), Heart(pulse_file(tmp_path, 0))
    start = time.monotonic() + 1
    for seconds in range(0, 41, 5):
        watch._look(start + seconds)
    heart.enter("forward")
    for seconds in range(45, 86, 5):
        watch._look(start + seconds)
    assert capsys.readouterr().err == "", "it went on in between"
    for seconds in (90, 95, 100):
        watch._look(start + seconds)
    reported = capsys.readouterr().err
    assert reported.count("Nothing has gone on for 45 s: rank 0 waits") == 1
    assert "The run ends when it lasts for 60 s (hang_seconds)" in reported
    assert watch.hang is None
    watch._look(start + 105)
    assert watch.hang == "hang: rank 0 waits (nothing has gone on for 60 s)"
    assert "samples of the" in capsys.readouterr().err


def test_ranks_that_move_because_another_machine_ended_theirs_are_reported_as_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other machine reports the hang and ends its ranks just when this one looks whether its own go on."""
    monkeypatch.setattr("drivetrain.launch.diagnostics.watchdog.ask", lambda *_: {})
    run, problems = load_run(prepared(tmp_path) / "run.yaml", [f"output={tmp_path / 'run'}", "hang_seconds=8"])
    assert run is not None, problems
    reported: list[str] = []
    monkeypatch.setattr(Meeting, "hang", lambda _: reported[0] if reported else "")
    watch = Watch(tmp_path, run, Meeting(run, Node()))
    _heart = Heart(pulse_file(tmp_path, 0))

    def ended_elsewhere(rows: list[Row], running: Any) -> bool:
        del rows, running
        reported.append("hang: rank 1 is stopped")
        return True

    monkeypatch.setattr(watch, "_goes_on", ended_elsewhere)
    monkeypatch.setattr("drivetrain.launch.diagnostics.watchdog.kill", lambda _: None)
    start = time.monotonic() + 1
    for seconds in range(0, 9, 4):
        watch._look(start + seconds)
    assert watch.hang is not None
    assert "samples of the" in capsys.readouterr().err


# --- who is named ----------------------------------------------------------------------------------------------------


def row(rank: int, state: State = "waits", seconds: float = 60.0, part: str = "backward", **found: Any) -> Row:
    pulse = Pulse(1000 + rank, rank, 9, 0.0, 7, 12, part, (4, 5), 2)
    return Row(pulse, "here", state, seconds, Standing(**{"inner": "c.py:1 call", "own": "model.py:7 f", **found}))


def reducing(rank: int, number: int, group: str = "0", **begun: int) -> Row:
    pending = [PendingCollective(group, number, "all_reduce of 8 Float")]
    return row(rank, call="backward", pending=pending, begun={group: number, **begun})


def test_a_rank_that_has_not_come_to_a_collective_is_named_with_where_it_is() -> None:
    late = row(2, part="data", own="data.py:3 load", begun={"0": 6})
    reported = blame([reducing(0, 7), reducing(1, 7), late, reducing(3, 7)])
    assert reported == (
        "rank 2 has not come to the all_reduce of 8 Float, number 7 of group 0 that ranks 0, 1, 3 wait in at "
        "model.py:7 f: process 1002 on here, in step 12, data at data.py:3 load"
    )


def test_of_ranks_that_wait_for_one_another_the_odd_one_is_named() -> None:
    apart = [reducing(rank, 2, "5", **{"0": 6}) for rank in (0, 2, 3)]
    astray = reducing(1, 7, "0", **{"5": 1})
    assert blame([*apart, astray]).startswith("rank 1 is not where the others are: process 1001")


def test_of_two_ranks_that_wait_for_one_another_both_are_reported() -> None:
    reported = blame([reducing(0, 2, "5", **{"0": 6}), reducing(1, 7, "0", **{"5": 1})])
    assert reported.startswith("the ranks are not in the same place: rank 0 (process 1000 on here), in step 12")
    assert "rank 1 (process 1001 on here)" in reported


def test_a_process_that_is_gone_is_named_with_its_last_resident_size_if_that_is_known() -> None:
    pulse = replace(row(1).pulse, resident=3 * 2**29)
    assert last_sizes([pulse, row(2).pulse, replace(pulse, resident=2**31)]) == "; last resident size: 1.5 GiB, 2.0 GiB"
    assert last_sizes([row(2).pulse]) == ""
    reported = blame([row(0), replace(row(1, state="gone"), pulse=pulse)])
    assert reported.startswith("rank 1 ended without an error: process 1001 on here")
    assert "because memory ran out; last resident size: 1.5 GiB)" in reported


def test_ranks_that_all_wait_in_the_same_collective_blame_no_rank() -> None:
    assert blame([reducing(0, 7), reducing(1, 7)]).startswith("ranks 0, 1 wait in the same place in all_reduce of 8")


@pytest.mark.parametrize("state", ["gone", "stopped", "disk", "silent"])
def test_what_the_system_says_of_a_process_comes_before_where_others_wait(state: State) -> None:
    assert blame([row(0, part="data"), reducing(1, 7), row(2, state)]).startswith("rank 2 ")


def test_a_loaders_process_that_was_stopped_is_named_with_its_rank() -> None:
    stuck = row(1, part="data", children=["its process 77 is in state stopped"], begun={"0": 6})
    assert blame([reducing(0, 7), stuck]).endswith("its process 77 is in state stopped")


def test_ranks_that_stand_in_one_place_share_a_row_and_a_stack() -> None:
    rows = [reducing(rank, 7) for rank in (*range(64), 65)] + [replace(reducing(66, 7), seconds=9.0)]
    rows = [replace(each, standing=replace(each.standing, stacks="  in forward")) for each in rows]
    rows.append(row(64, part="data", stacks="  in the loader"))
    shown = " ".join(table(rows).split())
    assert "0-63, 65, 66 │ 66 on here" in shown
    assert "64 │ 1064 on here │ waits │ step 12, data" in shown
    assert table(rows).count("model.py:7 f") == 2, "a row a place"
    assert re.search(r"9 to \d+ s", shown)
    full = in_full(rows)
    assert full.count("in forward\n") == full.count("in the loader\n") == 1
    assert "ranks 0-63, 65, 66, waits, in step" in full
    assert "rank 33: process 1033 on here" in full, "the process of each rank is kept"


def test_two_ranks_of_one_place_have_their_processes_and_samples_beside_one_another() -> None:
    lines = table([reducing(0, 7), reducing(1, 7)]).splitlines()
    [first] = [number for number, line in enumerate(lines) if "1000 on here" in line]
    assert "0, 1" in lines[first]
    assert "4, 5" in lines[first]
    assert "1001 on here" in lines[first + 1]
    assert "4, 5" in lines[first + 1]


def test_many_ranks_without_an_order_are_counted() -> None:
    rows = [reducing(rank, 7) for rank in range(0, 100, 2)]
    assert blame(rows).startswith("ranks 0, 2, 4, 6, 8, 10, 12, 14 and 42 more wait in the same place")


def test_the_table_has_a_row_a_place_and_the_file_their_stacks() -> None:
    rows = [reducing(0, 7), row(1, "stopped", 61.0, stacks="thread MainThread:\n  here")]
    for word in ("1000 on here", "stopped (T)", "step 12, backward", "4, 5", "model.py:7 f", "c.py:1 call", "61 s"):
        assert word in table(rows)
    full = in_full(rows)
    assert "under way: all_reduce of 8 Float, number 7 of group 0" in full
    assert "thread MainThread:\n  here" in full
    assert Row.of(json.loads(json.dumps(rows[0].as_dict()))).pulse.rank == 0, "it travels between machines"


def test_time_without_a_look_is_no_hang() -> None:
    stillness = Stillness(0.0)
    assert stillness.look(1.0, {"a": 1}) == 0.0
    assert stillness.look(5.0, {"a": 1}) == 4.0
    assert stillness.look(500.0, {"a": 1}) == 0.0, "the watching process was stopped as well"
    assert stillness.look(503.0, {"a": 1, "b": 2}) == 0.0, "one goes on, the others wait for it"
    assert stillness.of("a", 503.0) == 3.0


# --- where a process stands ------------------------------------------------------------------------------------------


def seen_waiting(late: int) -> dict[str, Any]:
    """Of a rank that waits in an all_reduce for the late one, as a thread beside it sees it."""

    if dist.get_rank() == late:
        time.sleep(1.5)
    main, found = threading.get_ident(), list[Standing]()
    timer = threading.Timer(0.5, lambda: found.append(standing(main)))
    timer.start()
    dist.all_reduce(torch.zeros(2, 3))
    timer.join()
    return {"place": found[0].place, "waits_in": found[0].waits_in, "own": found[0].own, "call": found[0].call}


def test_a_rank_that_waits_in_a_collective_says_which_one(ranks: Callable[[int], RankPool]) -> None:
    waiting, late = ranks(2).run(seen_waiting, 1)
    assert waiting["call"] == "all_reduce"
    assert waiting["waits_in"].startswith("all_reduce of 2x3 Float, number ")
    assert waiting["own"].startswith("test_hang_report.py:")
    assert waiting["own"].endswith(" seen_waiting")
    assert late["call"] == "", "by then it is through"


STANDING = """
import ctypes, os, sys, time
from pathlib import Path
from drivetrain.runtime.heartbeat import Heart
from drivetrain.launch.diagnostics.stack_request import Answers, pulse_file
folder, how = Path(sys.argv[1]), sys.argv[2]
heart = Heart(pulse_file(folder, 0), 0, Answers(folder, 0)).start()
heart.begin(1)
def astray():
    if how == "sleeping":
        time.sleep(60)
    if how == "holding":
        ctypes.PyDLL(None).sleep(60)  # with Python's lock
    os.kill(os.getpid(), 19)
    time.sleep(60)
astray()
"""


@pytest.fixture(params=["sleeping", "holding", "stopped"])
def astray(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    (tmp_path / "astray.py").write_text(STANDING)
    process = subprocess.Popen([sys.executable, str(tmp_path / "astray.py"), str(tmp_path), request.param])
    until = time.monotonic() + 60
    while not pulses(tmp_path) or not pulses(tmp_path)[0].step:
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(0.5)  # from there into the call
    yield request.param, tmp_path
    process.kill()
    process.wait()


def test_a_process_that_cannot_answer_is_asked_by_a_signal(
    astray: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    how, folder = astray
    monkeypatch.setattr(stack_request, "ANSWER_SECONDS", 2.0 if how == "holding" else 4.0)
    found = pulses(folder)
    reported = ask(folder, {}, found) if how == "stopped" else ask(folder, found)
    assert reported[0].own.endswith(" astray")
    assert "astray.py" in reported[0].stacks
    if how == "stopped":
        until = time.monotonic() + 10
        while psutil.Process(found[0].process).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < until, "it is to be as it was"
            time.sleep(0.05)


def test_a_process_without_a_watchdog_reports_once_that_nothing_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    heart, alone = Heart(), Alone(30)
    heart.begin(4)
    heart.enter("data")
    for still in (10.0, 31.0, 32.0):
        alone(heart, still)
    reported = capsys.readouterr().err
    assert reported.count("rank 0: nothing has gone on for 31 s (step 4, data)") == 1
    assert "test_a_process_without_a_watchdog" in reported
    alone(heart, 0.0)
    alone(heart, 40.0)
    assert "40 s" in capsys.readouterr().err, "again, once it has gone on"


def entry(number: int, state: str, name: str, created: int) -> dict[str, Any]:
    """As torch's flight recorders write one, but for what is not read."""
    return {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "is_p2p": False,
        "retired": state == "completed",
        "state": state,
        "profiling_name": name,
        "input_sizes": [[4, 5]],
        "input_dtypes": ["Float"],
        "time_created_ns": created,
    }


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """A process of a group with both backends, which waits in an all_reduce of NCCL. Gives what was asked for: which
    recorder, and whether for what is under way alone."""
    asked_for: list[tuple[str, bool]] = []
    kept = {
        "_dump_fr_trace": [entry(7, "completed", "gloo:all_reduce", 1), entry(8, "started", "gloo:broadcast", 2)],
        "_dump_nccl_trace": [entry(2, "completed", "nccl:all_reduce", 0), entry(3, "started", "nccl:all_reduce", 3)],
    }

    def dump(name: str, collectives: bool, stacks: bool, only_active: bool) -> bytes:
        assert (collectives, stacks) == (True, False)
        asked_for.append((name, only_active))
        return pickle.dumps({"entries": [e for e in kept[name] if not only_active or e["state"] != "completed"]})

    for name in kept:
        monkeypatch.setattr(torch._C._distributed_c10d, name, functools.partial(dump, name), raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return asked_for


def test_what_is_under_way_on_a_gpu_is_read_from_nccls_own_record(recorders: list[tuple[str, bool]]) -> None:
    found = standing(threading.get_ident())
    assert [str(each) for each in found.pending] == [
        "broadcast of 4x5 Float, number 8 of group 0",
        "all_reduce of 4x5 Float, number 3 of group 0 (NCCL)",
    ]
    assert [each.on_gpu for each in found.pending] == [False, True]
    assert found.begun == {"0": 8, "0 (NCCL)": 3}, "each backend numbers its own"
    assert found.waits_in == "all_reduce of 4x5 Float, number 3 of group 0 (NCCL)"
    assert {name for name, _ in recorders} == {"_dump_fr_trace", "_dump_nccl_trace"}


def test_a_rank_that_spins_for_nccl_does_not_work_and_is_asked_cheaply(recorders: list[tuple[str, bool]]) -> None:
    """Each second, with Python's lock: the whole record takes 26 ms to read."""
    assert waits_on_gpu()
    assert recorders == [("_dump_nccl_trace", True)]


@pytest.mark.parametrize(
    ("idle", "waits"), [(True, False), (False, True), (None, False)], ids=["idle", "busy", "broken"]
)
def test_a_program_that_waits_for_its_gpu_does_not_work(
    idle: bool | None, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a collective under way; after an error of CUDA, which answers nothing more, it is not known."""

    class Stream:
        def query(self) -> bool:
            if idle is None:
                raise RuntimeError("CUDA error: device-side assert triggered")
            return idle

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda number: number == 1, raising=False)
    monkeypatch.setattr(torch.cuda, "default_stream", {1: Stream()}.__getitem__)
    assert waits_on_gpu() is waits
