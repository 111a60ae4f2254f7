"""Comparisons that are started from a form: queued once, kept in a folder of their own, listed, and deleted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain.board import comparisons
from drivetrain.board.board import OWN, Board
from drivetrain.board.entries import claimed
from drivetrain.board.records import Claim, Ended, now
from drivetrain.compare import kept
from tests.board.boards import DIGITS, USERS, by, serving, write_run
from tests.running_server import Running

AXES = ["engine=single,ddp", "precision=fp32,bf16-mixed", "processes=2"]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Running, Board]]:
    with serving(tmp_path / "runs", USERS, data=[tmp_path]) as found:
        yield found


def sent(server: Running, user: str = "otto", key: str = "key-of-a-form", **changes: Any) -> tuple[int, Any]:
    return by(server, user, "/api/comparisons", {"key": key, "yaml": DIGITS, "axes": AXES, **changes})


def ended(board: Board, name: str, code: int = 0) -> None:
    folder = board.queue.entries.folder / name
    claimed(folder, Claim(by="keeper", time=now(), host="other", process=1))
    (folder / "ended.json").write_text(Ended(code=code, time=now()).model_dump_json())


def compared(folder: Path) -> None:
    """Writes what `drivetrain compare` leaves."""
    (folder / "cells").mkdir(parents=True)
    (folder / ".lock").touch()
    (folder / comparisons.ROWS).write_text("{}")
    rows = [{"engine": "ddp", "status": "completed", "seconds": 1.5, "runs": [{"report": {"large": "x" * 1000}}]}]
    (folder / comparisons.RESULT).write_text(json.dumps({"axes": ["engine"], "advice": "Choose ddp.", "rows": rows}))
    (folder / comparisons.PAGE).write_text("<!doctype html><title>mine</title>")


def test_the_names_of_files_are_those_of_compare() -> None:
    assert kept.ROWS == comparisons.ROWS
    assert {Path(comparisons.RESULT), Path(comparisons.PAGE)} <= set(kept.files_of(Path()))


def test_a_comparison_is_queued_once_as_the_command_that_one_would_type(served: tuple[Running, Board]) -> None:
    server, board = served
    status, entry = sent(server)
    assert (status, entry["verb"], entry["state"], entry["run"]) == (201, "compare", "queued", "run-compare")
    assert entry["command"].split()[:3] == ["drivetrain", "compare", "--seeds=1"]
    assert entry["command"].endswith(" ".join(AXES))
    assert f"--output={board.root / 'run-compare'}" in entry["command"]
    assert sent(server) == (200, entry)
    assert sent(server, seeds=2)[0] == 409  # the same key with another form
    assert len(board.queue.entries.all()) == 1
    assert sent(server, key="another-form")[1]["run"] == "run-compare-2"


def test_a_comparison_is_listed_looked_at_and_deleted(served: tuple[Running, Board]) -> None:
    server, board = served
    _, entry = sent(server)
    path = "/api/comparisons/run-compare"
    assert by(server, "vera", "/api/comparisons")[1]["comparisons"][0]["state"] == "queued"
    assert by(server, "vera", path)[1]["result"] is None
    assert by(server, "vera", f"{path}/page")[0] == 404
    assert by(server, "otto", path, method="DELETE")[0] == 409
    ended(board, entry["id"])
    compared(board.root / "run-compare")
    found = by(server, "vera", path)[1]
    assert found["result"]["rows"] == [{"engine": "ddp", "status": "completed", "seconds": 1.5}]
    assert (found["result"]["advice"], found["entry"]["state"]) == ("Choose ddp.", "completed")
    assert by(server, "vera", f"{path}/page") == (200, b"<!doctype html><title>mine</title>")
    assert by(server, "olga", path, method="DELETE")[0] == 403
    assert by(server, "otto", path, method="DELETE")[0] == 200
    assert not (board.root / "run-compare").exists()
    assert by(server, "vera", "/api/comparisons")[1]["comparisons"] == []
    assert by(server, "vera", path)[0] == 404


def test_a_comparison_is_no_run_and_a_run_no_comparison(served: tuple[Running, Board]) -> None:
    server, board = served
    compared(board.root / "typed-compare")  # by the command line
    (board.root / "begun-compare" / "cells").mkdir(parents=True)
    (board.root / "begun-compare" / ".lock").touch()
    write_run(board.root / "mine")
    assert [each["name"] for each in by(server, "vera", "/api/runs")[1]["runs"]] == ["mine"]
    assert [each["name"] for each in by(server, "vera", "/api/comparisons")[1]["comparisons"]] == ["typed-compare"]
    assert by(server, "vera", "/api/comparisons/mine")[0] == 404
    assert by(server, "otto", "/api/comparisons/mine", method="DELETE")[0] == 404
    assert by(server, "otto", "/api/comparisons/typed-compare", method="DELETE")[0] == 403  # the command line's
    for name in ("..", "%2e%2e", OWN, "..%2Fruns"):
        assert by(server, "anna", f"/api/comparisons/{name}", method="DELETE")[0] in (404, 405)
    assert board.root.is_dir()


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"axes": ["engine=ddp"]}, 422),  # nothing to compare
        ({"axes": ["sed=1,2"]}, 422),
        ({"axes": ["engine=ddp,ddp"]}, 422),
        ({"axes": [f"seed={','.join(map(str, range(65)))}"]}, 422),
        ({"axes": ["--fresh"]}, 400),
        ({"axes": ["workload.data.train=/etc/passwd,/etc/hosts"]}, 422),
        ({"axes": ["output=/tmp/a,/tmp/b"]}, 422),
        ({"yaml": "a: 1"}, 422),
        ({"seeds": 0}, 400),
    ],
)
def test_what_cannot_be_compared_is_refused(
    served: tuple[Running, Board], changes: dict[str, Any], status: int
) -> None:
    server, board = served
    assert sent(server, **changes)[0] == status
    assert board.queue.entries.all() == []


def test_viewers_start_and_delete_none(served: tuple[Running, Board]) -> None:
    server, board = served
    compared(board.root / "typed-compare")
    assert sent(server, "vera")[0] == 403
    assert by(server, "vera", "/api/comparisons/typed-compare", method="DELETE")[0] == 403
