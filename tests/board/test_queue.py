"""The queue: each entry once, in its order, on free devices, whatever happens to the server."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from drivetrain.board import keeper
from drivetrain.board import queue as module
from drivetrain.board.devices import CPU, Device, environment, free
from drivetrain.board.entries import LAUNCH, LAUNCH_SECONDS, NOT_STARTED, Entries, claimed
from drivetrain.board.keeper import TAKEN, keep
from drivetrain.board.queue import Queue
from drivetrain.board.records import Asked, Claim, Ended, Entry, now
from tests.board.boards import DIGITS, FixedMachine, ask, serving


def asked(name: str, **given: Any) -> Asked:
    fields = {"digest": name, "verb": "train", "run": name, "words": ["recipes"], "owner": "ann", "created": now()}
    return Asked(id=name, **{**fields, **given})


def waiting(entries: Entries, name: str, **given: Any) -> Entry:
    return entries.add(asked(name, **given), {})[0]


def until(what: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_one_form_sent_fifty_times_at_once_is_one_run(tmp_path: Path) -> None:
    with serving(tmp_path / "runs") as (server, board):
        body = {"key": "the-key-of-this-form", "yaml": DIGITS}
        with ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(lambda _: ask(server, "/api/queue", body), range(50)))
        assert sorted(status for status, _ in answers) == [200] * 49 + [201]
        assert len({found["id"] for _, found in answers}) == 1
        assert len(board.queue.entries.all()) == 1
        status, found = ask(server, "/api/queue", {**body, "yaml": DIGITS + "seed: 1\n"})
        assert (status, found["error"]["code"]) == (409, "key_reused")


def test_a_full_disk_is_reported_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, full = Path.open, [True]

    def opened(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if full and tmp_path in path.parents and mode[0] in "wa":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, mode, *rest, **named)

    with serving(tmp_path / "runs") as (server, board):
        monkeypatch.setattr(Path, "open", opened)
        body = {"key": "the-key-of-this-form", "yaml": DIGITS}
        for path, sent in (("/api/queue", body), ("/api/queue/settings", {"go_on_after_failure": False})):
            status, found = ask(server, path, sent)
            assert (status, found["error"]["code"]) == (507, "disk_full")
        status, found = ask(server, "/api/queue")
        assert (status, found["entries"], found["settings"]["go_on_after_failure"]) == (200, [], True)
        assert os.listdir(board.queue.entries.folder) == []
        full.clear()
        assert ask(server, "/api/queue", body)[0] == 201


def test_fifty_forms_are_fifty_runs_with_names_of_their_own(tmp_path: Path) -> None:
    with serving(tmp_path / "runs") as (server, board):
        bodies = [{"key": f"the-key-of-form-{number}", "yaml": DIGITS} for number in range(50)]
        with ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(lambda body: ask(server, "/api/queue", body), bodies))
        assert [status for status, _ in answers] == [201] * 50
        assert {found["run"] for _, found in answers} == {"run", *(f"run-{number}" for number in range(2, 51))}
        assert [each.state for each in board.queue.entries.all()] == ["queued"] * 50


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The devices of what would start: nothing does."""
    found: list[list[str]] = []

    def start(folder: Path, devices: Sequence[str], variables: Mapping[str, str]) -> int:
        del folder, variables
        found.append(list(devices))
        return 1 << 22  # no child of ours

    monkeypatch.setattr(module.keeper, "start", start)
    return found


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    found = [Device(str(number), "GPU", 8 << 30, 1, f"GPU-{number}", 0, 0.0) for number in range(4)]
    monkeypatch.setattr(module, "devices", lambda at_once: [*found, Device(CPU, "CPU", 8 << 30, at_once)])
    return found


def test_no_entry_is_put_on_a_busy_device(tmp_path: Path, four_gpus: list[Device], launched: list[list[str]]) -> None:
    queue = Queue(tmp_path)
    for number in range(50):
        waiting(queue.entries, f"run{number:02}", device="cuda")
    four_gpus[2] = Device("2", "GPU", 8 << 30, 1, "GPU-2", 5 << 30, 0.9)  # another program's
    for _ in range(3):
        queue.tick()
    assert launched == [["0"], ["1"], ["3"]]
    first = queue.entries.all()[0]
    claimed(queue.entries.folder / first.id, Claim(by="x", time=now()))  # cancelled: its device is free
    queue.tick()
    assert launched == [["0"], ["1"], ["3"], ["0"]]


def test_a_restarted_server_does_not_start_again_what_is_starting(
    tmp_path: Path, four_gpus: list[Device], launched: list[list[str]]
) -> None:
    del four_gpus
    waiting(Queue(tmp_path).entries, "one", device="cuda")
    Queue(tmp_path).tick()
    waiting(Queue(tmp_path).entries, "two", device="cuda")
    Queue(tmp_path).tick()  # a server that was killed between start and claim, and begun again
    assert launched == [["0"], ["1"]]
    file = tmp_path / "entries" / "one" / LAUNCH
    file.write_text(json.dumps({**json.loads(file.read_text()), "time": time.time() - LAUNCH_SECONDS - 1}))
    Queue(tmp_path).tick()
    assert launched == [["0"], ["1"], ["0"]], "a keeper that never came: the entry is started again"


def test_a_large_run_is_not_passed_by_small_ones_for_ever(tmp_path: Path, four_gpus: list[Device]) -> None:
    entries = Entries(tmp_path / "entries")
    busy = waiting(entries, "busy", device="cuda")
    entries.launching(busy, ["0", "1"])
    large = waiting(entries, "large", device="cuda", count=3)
    small = waiting(entries, "small", device="cuda")
    every = entries.all()
    assert free(large, every, four_gpus) is None
    assert free(small, every, four_gpus) == ["2"], "it would fit, but stands behind"


def test_chosen_devices_are_waited_for_and_given_by_their_uuid(tmp_path: Path, four_gpus: list[Device]) -> None:
    entries = Entries(tmp_path / "entries")
    first = waiting(entries, "first", device="cuda", wanted=["1", "3"])
    assert free(first, [], four_gpus) == ["1", "3"]
    entries.launching(first, ["1", "3"])
    second = waiting(entries, "second", device="cuda", wanted=["3"])
    assert free(second, entries.all(), four_gpus) is None
    assert environment(["1", "3"], four_gpus) == {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-3"}
    assert environment([CPU], four_gpus) == {"CUDA_VISIBLE_DEVICES": ""}, "a process on the CPU sees no GPU"


def test_entries_that_wait_can_be_put_in_order_and_cancelled(tmp_path: Path) -> None:
    with serving(tmp_path / "runs") as (server, board):
        ids = []
        for number in range(4):
            body = {"key": f"key-of-form-{number}", "yaml": DIGITS}
            ids.append(ask(server, "/api/queue", body)[1]["id"])
        _, found = ask(server, "/api/queue/order", {"ids": [ids[2], "unknown", ids[0], ids[2]]})
        assert [each["id"] for each in found["entries"]] == [ids[2], ids[0], ids[1], ids[3]]
        assert ask(server, f"/api/queue/{ids[0]}/cancel", {})[1]["state"] == "cancelled"
        status, found = ask(server, f"/api/queue/{ids[0]}/cancel", {})
        assert (status, found["error"]["code"]) == (409, "not_waiting")
        assert keep(board.queue.entries.folder / ids[0], [CPU]) == TAKEN, "what was cancelled never starts"
        assert ask(server, f"/api/queue/{ids[0]}", method="DELETE")[0] == 204
        assert ask(server, f"/api/queue/{ids[1]}", method="DELETE")[0] == 409
        assert ask(server, "/api/queue", {"key": "key-of-devices", "yaml": DIGITS, "devices": ["9"]})[0] == 422


def test_cancel_and_start_at_the_same_moment_have_one_winner(tmp_path: Path) -> None:
    entries = Entries(tmp_path / "entries")
    for number in range(20):
        entry = waiting(entries, f"run{number}")
        folder = entries.folder / entry.id
        barrier = threading.Barrier(8)

        def race(number: int, folder: Path = folder, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            return claimed(folder, Claim(by=str(number), time=now()))

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(race, range(8))) == 1


def test_a_keeper_writes_down_how_its_process_ended(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "board")
    waiting(queue.entries, "good")
    waiting(queue.entries, "bad", words=["init", "no-such-recipe"])
    queue.change(at_once_cpu=2)
    queue.start()
    try:
        until(lambda: all(not each.is_live for each in queue.entries.all()))
    finally:
        queue.close()
    good, bad = (queue.entries.one(name) for name in ("good", "bad"))
    assert good is not None
    assert bad is not None
    assert (good.state, good.reason, good.ended and good.ended.code) == ("completed", None, 0)
    assert (bad.state, bad.ended and bad.ended.code) == ("refused", 2)
    assert "there is no recipe no-such-recipe" in str(bad.reason)
    assert "digits" in (queue.entries.folder / "good" / "log.txt").read_text()
    assert good.claim is not None
    assert good.claim.devices == [CPU]


def test_a_failure_pauses_the_queue_where_it_is_asked_to(tmp_path: Path, launched: list[list[str]]) -> None:
    queue = Queue(tmp_path)
    queue.change(go_on_after_failure=False)
    first = waiting(queue.entries, "first")
    claimed(queue.entries.folder / first.id, Claim(by="keeper", time=now(), process=1, host="here"))
    (queue.entries.folder / first.id / "ended.json").write_text(Ended(code=1, time=now()).model_dump_json())
    waiting(queue.entries, "second")
    queue.tick()
    assert not launched
    assert (queue.settings.paused, queue.settings.paused_because) == (True, "first: failed")
    queue.change(paused=False)
    queue.tick()
    assert launched == [[CPU]]
    assert queue.settings.paused_because is None


def test_a_broken_file_of_settings_or_of_an_entry_stops_nothing(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    waiting(queue.entries, "one")
    (queue.entries.folder / "half").mkdir()
    (queue.entries.folder / "half" / "entry.json").write_text("{")
    (tmp_path / "queue.json").write_text("[]")
    assert [each.id for each in queue.entries.all()] == ["one"]
    assert queue.settings.at_once_cpu == 1


def test_a_run_for_gpus_asks_for_as_many_as_its_engine_has(tmp_path: Path) -> None:
    with serving(tmp_path / "runs", machine=FixedMachine("cuda", 4)) as (server, board):
        text = DIGITS + "engine: fsdp\nprocesses: 2\n"
        for number, given in enumerate((text, text + "device: cpu\n")):
            status, found = ask(server, "/api/queue", {"key": f"key-of-gpus-{number}", "yaml": given})
            assert status == 201, found
        wanted = [(each.asked.device, each.asked.count) for each in board.queue.entries.all()]
        assert wanted == [("cuda", 2), ("cpu", 1)]


def test_nothing_that_the_board_starts_has_its_token_its_terminal_or_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in keeper.HIDDEN:
        monkeypatch.setenv(name, "secret" * 8)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(os, "posix_spawn", lambda *words, **given: seen.update(given, own=words[2]))
    keeper.start(tmp_path, ["0"], {"CUDA_VISIBLE_DEVICES": "GPU-0"})
    assert not [value for value in seen["own"].values() if "secret" in value]
    assert seen["own"]["CUDA_VISIBLE_DEVICES"] == "GPU-0"
    assert seen["setsid"]
    opened = {number: place for kind, number, place, *_ in seen["file_actions"] if kind == os.POSIX_SPAWN_OPEN}
    assert opened == {0: os.devnull, 1: str(tmp_path / "log.txt")}


@pytest.mark.parametrize("words", [["predict", "x" * (1 << 22)], ["predict", "a\0b"]])
def test_words_that_no_process_takes_end_as_failed_with_the_reason(tmp_path: Path, words: list[str]) -> None:
    entries = Entries(tmp_path / "entries")
    folder = entries.folder / waiting(entries, "one", words=words).id
    assert keep(folder, [CPU]) == 0
    found = entries.one("one")
    assert found is not None
    assert (found.state, found.ended and found.ended.code) == ("failed", NOT_STARTED)
    assert "could not be started" in str(found.reason)


def test_a_keeper_that_cannot_be_started_is_reported_and_the_next_entry_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: list[list[str]]
) -> None:
    queue = Queue(tmp_path)
    waiting(queue.entries, "first")
    waiting(queue.entries, "second")
    start = module.keeper.start

    def fails_once(folder: Path, *rest: Any) -> int:
        if folder.name == "first":
            raise OSError(12, "Cannot allocate memory")
        return start(folder, *rest)

    monkeypatch.setattr(module.keeper, "start", fails_once)
    queue.tick()
    found = queue.entries.one("first")
    assert found is not None
    assert (found.state, found.reason) == ("failed", "its keeper could not be started: Cannot allocate memory")
    assert launched == [[CPU]]


def test_a_keeper_that_dies_before_it_begins_is_reported_on_its_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(tmp_path)
    waiting(queue.entries, "one")
    monkeypatch.setattr(keeper, "MODULE", "drivetrain.no_such_module")
    queue.start()
    try:
        until(lambda: not queue.entries.all()[0].is_live)
    finally:
        queue.close()
    found = queue.entries.one("one")
    assert found is not None
    assert found.state == "failed"
    assert "its keeper ended with code 1 before it began" in str(found.reason)
    assert "no_such_module" in str(found.reason)


@pytest.mark.parametrize(("code", "now_", "state"), [(-15, False, "interrupted"), (-9, True, "interrupted"),
                                                     (-15, None, "failed"), (1, False, "failed")])  # fmt: skip
def test_what_a_user_ended_is_interrupted_and_what_fails_by_itself_is_not(
    tmp_path: Path, code: int, now_: bool | None, state: str
) -> None:
    entries = Entries(tmp_path / "entries")
    entry = waiting(entries, "one", verb="serve")
    claimed(entries.folder / entry.id, Claim(by="keeper", time=now(), process=1, host="other"))
    if now_ is not None:
        entries.stop(entry, "ann", at_once=now_)
    (entries.folder / entry.id / "ended.json").write_text(Ended(code=code, time=now()).model_dump_json())
    found = entries.one("one")
    assert found is not None
    assert found.state == state
