"""History and curves, read from folders of runs and from nothing else."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from drivetrain.board.access import User
from drivetrain.board.board import OWN, Board
from drivetrain.board.curves import Curves
from drivetrain.board.entries import claimed
from drivetrain.board.last_start import LastStarts
from drivetrain.board.records import Asked, Claim, Ended, now
from drivetrain.board.run_details import details
from drivetrain.board.run_record import record_of
from drivetrain.board.run_summary import EDGE
from drivetrain.board.runs import Runs
from drivetrain.run_page.page import as_html
from drivetrain.tracking.columns import MOST_MARKS, thinned
from drivetrain.web.refusals import Refusal
from tests.board.boards import TOKENS, USERS, append, ask, made, point, serving, write_run


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return made(tmp_path / "runs")


@pytest.fixture
def runs(board: Board) -> Runs:
    return board.runs


def entry(board: Board, run: str, name: str = "a" * 20, **given: Any) -> Asked:
    asked = Asked(id=name, digest="", verb="train", run=run, words=["train", "x"], owner="ann", created=now(), **given)
    board.queue.add(asked, {"run.yaml": "# mine\n"})
    return asked


def test_a_runs_status_is_what_its_folder_says(runs: Runs) -> None:
    for status in ("completed", "stopped_early", "interrupted", "failed"):
        write_run(runs.root / status, finished=status)
    write_run(runs.root / "killed", finished=None)
    found = {each["name"]: each["status"] for each in runs.all()}
    assert found == {
        **{status: status for status in ("completed", "stopped_early", "interrupted", "failed")},
        "killed": "lost",
    }


def test_a_run_that_was_started_elsewhere_is_seen_to_work_without_taking_its_lock(runs: Runs) -> None:
    folder = write_run(runs.root / "works", finished=None)
    code = (
        "import sys; from pathlib import Path; from drivetrain.runtime.lock import held\n"
        "with held(Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        found = runs.one("works")
        assert (found["status"], found["can"]) == ("running", ["clone"])
        other.communicate()
    assert runs.one("works")["status"] == "lost"


def test_a_summary_has_the_last_point_the_last_evaluation_and_the_settings(runs: Runs) -> None:
    folder = write_run(runs.root / "one", steps=12, finished=None, precision="bf16-mixed", engine={"name": "fsdp"})
    append(folder, "evaluation", step=12, metrics={"accuracy": 0.5, "loss": 1.5}, seconds=1.0, best=True)
    found = runs.one("one")
    assert {"step": 12, "total_steps": 100, "loss": pytest.approx(1 / 12), "engine": "fsdp", "precision": "bf16-mixed",
            "metrics": {"accuracy": 0.5, "loss": 1.5}}.items() <= found.items()  # fmt: skip


def test_an_unchanged_run_is_not_read_again(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(runs.root / "one")
    before = runs.all()
    import drivetrain.board.runs as module

    read: list[Path] = []
    real = module.summary
    monkeypatch.setattr(module, "summary", lambda folder, *rest: read.append(folder) or real(folder, *rest))
    assert runs.all()[0] is before[0]
    assert not read
    point(folder, 31)
    assert runs.all()[0]["step"] == 31
    assert read == [folder]


def test_the_middle_of_a_long_curve_is_not_read_for_a_summary(runs: Runs) -> None:
    folder = write_run(runs.root / "long", steps=3000, finished=None)
    assert (folder / "events.jsonl").stat().st_size > 5e5
    found = runs.one("long")
    assert (found["step"], found["total_steps"]) == (3000, 100)


def test_a_run_without_a_name_of_its_own_is_not_overwritten(board: Board) -> None:
    write_run(board.root / "digits")
    entry(board, "digits-2")
    assert board.runs.free_name("digits") == "digits-3"
    assert board.runs.free_name("other") == "other"


def test_deleting_frees_what_it_said_and_nothing_else(board: Board) -> None:
    write_run(board.root / "gone")
    write_run(board.root / "gone-too")
    outside = board.root.parent / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x" * 1000)
    (board.root / "gone" / "link").symlink_to(outside)
    said = sum(each["bytes"] for each in details(board.runs, Curves(), "gone")["files"])
    assert board.runs.delete("gone") == said
    assert {each["name"] for each in board.runs.all()} == {"gone-too"}
    assert (outside / "kept").exists()
    assert sorted(each.name for each in board.root.iterdir()) == [OWN, "gone-too"]


def test_a_run_that_waits_or_works_is_not_deleted(board: Board) -> None:
    write_run(board.root / "one")
    entry(board, "one")
    with pytest.raises(Refusal, match="queued"):
        board.runs.delete("one")


def test_a_vanished_process_is_lost_and_can_be_resumed(board: Board) -> None:
    folder = write_run(board.root / "one", finished=None)
    (folder / "checkpoints" / "step-00000010").mkdir(parents=True)
    asked = entry(board, "one")
    place = board.queue.entries.folder / asked.id
    claimed(place, Claim(by="keeper", time="2026-01-01", host=socket.gethostname(), process=1 << 22, created=1.0))
    found = board.runs.one("one")
    assert found["status"] == "lost"
    assert "resume" in found["can"]
    assert "vanished" in found["message"]


def test_tags_notes_and_search(tmp_path: Path) -> None:
    with serving(tmp_path / "runs") as (server, board):
        for name in ("alpha", "beta", "gamma"):
            write_run(board.root / name)
        status, found = ask(server, "/api/runs/alpha/tags", {"tags": ["good", "good"], "note": "<b>the best</b>"})
        assert (status, found["tags"], found["note"]) == (200, ["good"], "<b>the best</b>")
        names = lambda query: [each["name"] for each in ask(server, f"/api/runs?{query}")[1]["runs"]]  # noqa: E731
        assert names("tag=good") == ["alpha"]
        assert names("search=best%20alp") == ["alpha"]
        assert names("search=nothing") == []
        assert names("status=completed&limit=2") == names("limit=2")
        assert ask(server, "/api/runs?limit=1")[1]["total"] == 3
        assert ask(server, "/api/runs/alpha/tags", {"tags": ["x" * 50]})[0] == 400


# --- curves ------------------------------------------------------------------------------------------------------


def test_a_curve_is_read_on_from_where_it_was_read_last(tmp_path: Path) -> None:
    folder, curves = write_run(tmp_path / "one", steps=5, finished=None), Curves()
    first = curves.since(folder, None, 1000)
    assert first["columns"]["step"] == [1, 2, 3, 4, 5]
    assert first["reset"]
    point(folder, 6, loss=math.nan)
    append(folder, "evaluation", step=6, metrics={"accuracy": 0.5}, seconds=1.0, best=True)
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "step", "st')  # half a line
    second = curves.since(folder, first["cursor"], 1000)
    assert not second["reset"]
    assert second["columns"]["step"] == [6]
    assert second["columns"]["loss"] == [None], "a gap in the plot, and no number that JSON lacks"
    assert second["evaluations"] == [
        {"step": 6, "metrics": {"accuracy": 0.5}, "best": True, "epoch": 0.6, "samples": 48.0, "seconds": 3.0}
    ]
    assert [each["kind"] for each in second["marks"]] == ["best"]
    assert curves.since(folder, second["cursor"], 1000)["columns"]["step"] == []


def test_memory_utilisation_and_time_by_part_are_curves_where_a_run_has_them(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", steps=2, finished=None)
    device = {"memory": {"allocated": 512, "reserved": 1024}, "utilisation": 0.75}
    point(folder, 3, **device, seconds_by_part={"data": 1.0, "forward": 3.0})
    columns = Curves().since(folder, None, 1000)["columns"]
    assert columns["memory"] == [None, None, 1024.0], "of an older run's points they are gaps"
    assert columns["utilisation"] == [None, None, 0.75]
    assert (columns["time_data"][-1], columns["time_forward"][-1], columns["time_save"][-1]) == (0.25, 0.75, None)


def test_a_resumed_runs_curve_begins_anew(tmp_path: Path) -> None:
    folder, curves = write_run(tmp_path / "one", steps=5, finished=None), Curves()
    cursor = curves.since(folder, None, 1000)["cursor"]
    kept = (folder / "events.jsonl").read_text().splitlines(keepends=True)[:3]
    aside = folder / "aside"
    aside.write_text("".join(kept))
    aside.replace(folder / "events.jsonl")  # as a resumed run cuts the points that come again
    append(folder, "run_started", name="one", output="", total_steps=100, first_step=2, samples_per_epoch=10)
    point(folder, 3)
    found = curves.since(folder, cursor, 1000)
    assert found["reset"]
    assert found["columns"]["step"] == [1, 2, 3]
    assert found["marks"] == [{"step": 2, "kind": "restart", "text": "went on from step 2"}]


@pytest.mark.parametrize("cursor", ["", "x", "1-2-3-4", "9" * 40, "-1--1--1--1", "0-0-0-0", "1-2-3"])
def test_a_cursor_of_another_curve_gives_the_whole(tmp_path: Path, cursor: str) -> None:
    assert Curves().since(write_run(tmp_path / "one", steps=5), cursor, 1000)["reset"]


def test_a_thinned_curve_keeps_its_ends_and_every_peak() -> None:
    values = array("d", [math.sin(number / 1000) for number in range(100_000)])
    values[12_345], values[67_890] = 50.0, -50.0
    places = thinned(values, 2000)
    assert len(places) <= 2002
    assert {0, 12_345, 67_890, 99_999} <= set(places)
    assert places == sorted(set(places))


def test_a_run_without_events_has_an_empty_curve(tmp_path: Path) -> None:
    found = Curves().since(tmp_path, None, 100)
    assert found["columns"]["step"] == []
    assert found["total"] == 0


def test_a_curve_sends_marks_beyond_those_that_are_kept(tmp_path: Path) -> None:
    folder, curves = write_run(tmp_path / "one", steps=1, finished=None), Curves()
    for number in range(MOST_MARKS + 10):
        append(folder, "warning", message=f"warning {number}")
    first = curves.since(folder, None, 100)
    assert len(first["marks"]) == MOST_MARKS
    cursor = first["cursor"]
    for number in range(3):
        append(folder, "warning", message=f"new {number}")
        found = curves.since(folder, cursor, 100)
        assert ([each["text"] for each in found["marks"]], found["reset"]) == ([f"new {number}"], False)
        cursor = found["cursor"]
    for _ in range(MOST_MARKS + 5):
        append(folder, "warning", message="many")
    assert len(curves.since(folder, cursor, 100)["marks"]) == MOST_MARKS


def test_a_long_run_that_was_resumed_is_running_with_the_steps_of_its_last_start(board: Board) -> None:
    folder = write_run(board.root / "long", steps=2000, finished=None)
    asked = entry(board, "long")
    claim = Claim(by="keeper", time="2026-11-25T12:30:00.000+00:00", host="other", process=1)
    claimed(board.queue.entries.folder / asked.id, claim)
    assert board.runs.one("long")["status"] == "starting"
    later = {"time": "2026-11-25T12:31:00.000+00:00"}
    append(folder, "run_started", name="long", output="", total_steps=9000, first_step=2000, samples_per_epoch=10,
           **later)  # fmt: skip
    for step in range(2001, 4000):
        point(folder, step)
    assert (folder / "events.jsonl").stat().st_size > 8 * EDGE, "the second start lies far from both ends"
    for runs in (board.runs, Runs(board.root, board.queue.entries)):
        found = runs.one("long")
        assert (found["status"], found["step"], found["total_steps"]) == ("running", 3999, 9000)


def test_the_last_start_is_read_on_from_where_it_was_read_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, starts = write_run(tmp_path / "one", steps=300, finished=None), LastStarts()
    file = folder / "events.jsonl"
    assert starts.of(file)["first_step"] == 0
    monkeypatch.setattr("drivetrain.board.last_start.BLOCK", 100)  # lines over several blocks
    with file.open("a") as written:
        written.write('{"time": "x", "event": "run_started", "first')  # half a line
    assert starts.of(file)["first_step"] == 0
    with file.open("a") as written:
        written.write('_step": 300, "name": "one", "output": "", "total_steps": 5, "samples_per_epoch": 1}\n')
    assert starts.of(file)["first_step"] == LastStarts().of(file)["first_step"] == 300
    kept = file.read_text().splitlines(keepends=True)[:3]
    (folder / "aside").write_text("".join(kept))
    (folder / "aside").replace(file)
    assert starts.of(file)["first_step"] == 0, "another file"
    assert starts.of(folder / "none") == {}


@pytest.mark.parametrize("verb", ["evaluate", "predict", "export", "serve"])
def test_a_run_is_not_deleted_while_anything_of_it_waits_or_works(board: Board, verb: str) -> None:
    folder = write_run(board.root / "one")
    asked = Asked(id="b" * 20, digest="", verb=verb, run="one", words=[verb, "x"], owner="ann", created=now())
    board.queue.add(asked, {})
    place = board.queue.entries.folder / asked.id
    for state in ("queued", "running"):
        assert "delete" not in board.runs.one("one")["can"]
        assert "delete" not in board.runs.all()[0]["can"]
        with pytest.raises(Refusal, match=f"{verb} of the run is {state}"):
            board.runs.delete("one")
        claimed(place, Claim(by="keeper", time=now(), host="other", process=1))
    assert folder.exists()
    (place / "ended.json").write_text(Ended(code=0, time=now()).model_dump_json())
    assert "delete" in board.runs.one("one")["can"]
    assert board.runs.delete("one") > 0
    assert not folder.exists()
    assert not place.exists()


def test_a_run_is_not_deleted_while_its_resume_waits(board: Board) -> None:
    write_run(board.root / "one")
    first = entry(board, "one")
    place = board.queue.entries.folder / first.id
    claimed(place, Claim(by="keeper", time=now(), host="other", process=1))
    (place / "ended.json").write_text(Ended(code=0, time=now()).model_dump_json())
    again = entry(board, "one", "c" * 20, resume=True)
    with pytest.raises(Refusal, match="queued"):
        board.delete(User("anna", "administrator"), "one")
    claimed(board.queue.entries.folder / again.id, Claim(by="anna", time=now()))
    assert board.delete(User("anna", "administrator"), "one") > 0


def test_the_report_of_a_run_is_a_download_for_viewers_too(tmp_path: Path) -> None:
    with serving(tmp_path / "runs", USERS) as (server, board):
        name = 'größe 一 "two"; x=1'
        write_run(board.root / name, steps=40)
        where = f"/api/runs/{quote(name)}/report"
        status, headers, page = server.ask(where, None, None, authorization=f"Bearer {TOKENS['vera']}")
        assert status == 200
        assert headers["content-type"].startswith("text/html")
        assert headers["content-disposition"] == f"attachment; filename*=UTF-8''{quote(name + '.html', safe='')}"
        assert b"<figcaption>Loss</figcaption>" in page
        assert server.ask("/api/runs/none/report", authorization=f"Bearer {TOKENS['vera']}")[0] == 404
        assert server.ask(where)[0] == 401


def test_the_report_of_a_run_that_never_began_has_its_log(board: Board) -> None:
    asked = entry(board, "mine")
    folder = board.queue.entries.folder / asked.id
    claimed(folder, Claim(by="keeper", time=now(), host="other", process=1))
    (folder / "log.txt").write_text("no room on the disk\n")
    (folder / "ended.json").write_text(Ended(code=1, time=now()).model_dump_json())
    record = record_of(board.runs, board.queue.entries, "mine")
    assert (record.status, record.sent) == ("failed", "# mine\n")
    assert "no room on the disk" in as_html(record)


def test_pages_that_ask_for_a_run_that_changed_have_its_files_read_once(runs: Runs, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "mine", steps=3, finished=None)
    before = runs.one("mine")
    point(folder, 4)
    after = runs.one("mine")
    assert (before["step"], after["step"]) == (3, 4)
    assert runs.one("mine") is after


def test_what_a_run_says_in_words_is_read_on_from_where_it_was_read_last(tmp_path: Path) -> None:
    folder, curves = write_run(tmp_path / "one", steps=200, finished=None), Curves()
    assert [each["event"] for each in curves.in_words(folder)] == ["run_started"]
    with (folder / "events.jsonl").open("r+b") as file:  # what was read is not looked at again
        size = file.seek(0, 2)
        file.seek(0)
        file.write(b"x" * (size - 1))
    append(folder, "warning", message="careful")
    assert [each["event"] for each in curves.in_words(folder)] == ["run_started", "warning"]
    (folder / "events.jsonl").unlink()
    assert curves.in_words(folder) == []
