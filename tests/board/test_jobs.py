"""Files, previews and plans, and what is made of a trained run: through the command line's own verbs."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from drivetrain.board import keeper
from drivetrain.board.board import OWN, Board
from drivetrain.board.entries import claimed, read_stop
from drivetrain.board.queue import Queue
from drivetrain.board.records import Asked, Claim, Ended, now
from drivetrain.board.verbs import fixes, previewed
from tests.board.boards import DIGITS, TOKEN, USERS, ask, by, serving
from tests.running_server import Running


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("board")
    (found / "data" / "inner").mkdir(parents=True)
    (found / "data" / "a.csv").write_text("text,label\n")
    (found / "data" / ".hidden").write_text("secret")
    (found / "data-too").mkdir()
    (found / "data-too" / "secret.txt").write_text("secret")
    (found / "data" / "outside").symlink_to(found / "data-too")
    return found


@pytest.fixture(scope="module")
def made(place: Path) -> Iterator[tuple[Running, Board]]:
    with serving(place / "runs", data=[place / "data"]) as found:
        yield found


@pytest.fixture(scope="module")
def server(made: tuple[Running, Board]) -> Running:
    return made[0]


def trained(board: Board, name: str) -> Path:
    """A folder of a run with a checkpoint, as far as the board looks at one."""
    folder = board.root / name
    if not folder.exists():
        (folder / "checkpoints" / "step-00000003").mkdir(parents=True)
        (folder / "run.yaml").write_text(DIGITS + f"name: {name}\n")
        (folder / "events.jsonl").write_text("")
    return folder


# --- files -------------------------------------------------------------------------------------------------------


def test_the_picker_shows_the_folders_of_data_and_nothing_outside_them(server: Running, place: Path) -> None:
    _, found = ask(server, "/api/files")
    assert [(each["name"], each["folder"]) for each in found["entries"]] == [("inner", True), ("a.csv", False)]
    assert found["parent"] is None
    _, inner = ask(server, f"/api/files?path={place}/data/inner")
    assert inner["parent"] == str(place / "data")
    for path in (place, place / "data-too", place / "data" / "outside", place / "data" / ".." / "data-too", "/etc",
                 place / "nothing", place / "data" / "a.csv", "%00"):  # fmt: skip
        assert ask(server, f"/api/files?path={path}")[0] == 404, path


def test_a_path_outside_is_answered_as_one_that_is_not_there(server: Running, place: Path) -> None:
    answers = [ask(server, f"/api/files?path={path}") for path in (place / "data-too", place / "nothing")]
    assert answers[0] == answers[1], "it tells nothing about what is there"


def test_a_file_is_put_into_a_folder_of_data_whole_and_replaces_none(server: Running, place: Path) -> None:
    def send(name: str, folder: Path, content: bytes = b"text,label\nGood,1\n") -> tuple[int, Any]:
        asked = f"/api/uploads?name={quote(name)}&folder={quote(str(folder))}"
        return ask(server, asked, content, content_type="application/octet-stream")

    status, found = send("酒店 1.csv", place / "data" / "inner")
    assert (status, found["path"]) == (201, str(place / "data" / "inner" / "酒店 1.csv"))
    assert (place / "data" / "inner" / "酒店 1.csv").read_bytes() == b"text,label\nGood,1\n"
    assert send("a.csv", place / "data")[1]["error"]["code"] == "exists"
    assert (place / "data" / "a.csv").read_text() == "text,label\n"
    for folder in (place, place / "data-too", place / "data" / "outside", place / "data" / "..", place / "runs"):
        assert send("b.csv", folder)[0] == 404, folder
    for name in (".hidden", "../b.csv", "inner/b.csv", "a\0b"):
        assert send(name, place / "data")[0] == 422, name
    assert send("b.csv", place / "data", b"")[0] in (400, 422)
    assert send("b.csv", place / "data" / "a.csv")[0] == 403
    assert sorted(os.listdir(place / "data")) == [".hidden", "a.csv", "inner", "outside"]
    shutil.rmtree(place / "data" / "inner")
    (place / "data" / "inner").mkdir()


def test_uploads_are_their_owners_and_have_names_without_folders(server: Running, place: Path) -> None:
    def send(query: str, content: bytes = b"text\nGood.\n") -> tuple[int, Any]:
        headers = {"content_type": "application/octet-stream", "authorization": f"Bearer {TOKEN}"}
        status, _, found = server.ask(f"/api/uploads?{query}", content, **headers)
        return status, found

    status, found = send("name=rows.csv")
    assert (status, found["bytes"]) == (201, 11)
    kept = list((place / "runs" / OWN / "uploads").rglob("rows.csv"))
    assert [each.read_bytes() for each in kept] == [b"text\nGood.\n"]
    assert send(f"name=more.csv&beside={found['id']}")[1]["id"] == found["id"]
    for name in ("..%2Fout.csv", "a%2Fb", "..", "%00", ".hidden", "a%0Ab"):
        assert send(f"name={name}")[0] == 422, name
    assert send("name=a.csv", b"")[0] in (400, 422)
    other = found["id"][:-1] + ("1" if found["id"].endswith("0") else "0")
    assert send(f"name=a.csv&beside={other}")[0] == 404
    assert send("name=a.csv&beside=..")[0] == 404


# --- verbs -------------------------------------------------------------------------------------------------------


def words_of(board: Board, found: dict[str, Any]) -> list[str]:
    entry = board.queue.entries.one(found["id"])
    assert entry is not None
    return entry.asked.words


def test_an_evaluation_a_prediction_and_an_export_are_lines_that_one_could_type(
    server: Running, made: tuple[Running, Board], place: Path
) -> None:
    board, folder = made[1], trained(made[1], "one")
    _, found = ask(server, "/api/runs/one/evaluate", {"key": "key-evaluate", "data": str(place / "data" / "a.csv")})
    override = f"workload.data.evaluation={place / 'data' / 'a.csv'}"
    assert words_of(board, found) == ["evaluate", str(folder), override, "--checkpoint=best"]
    _, found = ask(server, "/api/runs/one/predict", {"key": "key-predict", "rows": ["--help", "$(id)"],
                                                     "checkpoint": "step-00000003"})  # fmt: skip
    output = board.queue.entries.folder / found["id"] / "predictions.jsonl"
    checkpoint = folder / "checkpoints" / "step-00000003"
    assert words_of(board, found) == ["predict", str(folder), f"--checkpoint={checkpoint}", "--data=-",
                                      f"--output={output}"]  # fmt: skip
    assert (output.parent / "texts.txt").read_text() == "--help\n$(id)\n", "a file: a command has no room for them"
    assert found["command"].endswith(" < texts.txt")
    _, found = ask(server, "/api/runs/one/export", {"key": "key-export", "format": "onnx"})
    assert words_of(board, found)[2:5] == ["--checkpoint=best", "--to=onnx", "--json"]
    assert words_of(board, found)[5].startswith(f"--output={folder}/exports/onnx-")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("predict", {"checkpoint": "../../../etc"}, 404),
        ("predict", {"checkpoint": "step-00000009"}, 404),
        ("predict", {"path": "/etc/passwd"}, 404),
        ("predict", {"upload": "../../token"}, 404),
        ("predict", {"rows": ["a"], "path": "/a"}, 400),
        ("predict", {"rows": ["a\nb"]}, 400),
        ("predict", {"rows": [" "]}, 400),
        ("evaluate", {"data": "/etc/passwd"}, 404),
        ("export", {"format": "--output=/tmp/x"}, 400),
        ("export", {"format": "onnx", "quantise": "--trust"}, 400),
        ("export", {"format": "onnx", "dtype": "fp99"}, 400),
    ],
)
def test_what_would_lead_elsewhere_is_refused(
    server: Running, made: tuple[Running, Board], path: str, body: dict[str, Any], status: int
) -> None:
    trained(made[1], "one")
    assert ask(server, f"/api/runs/one/{path}", {"key": "key-of-an-attack", **body})[0] == status


def test_a_run_without_a_checkpoint_is_not_predicted_with(server: Running, made: tuple[Running, Board]) -> None:
    folder = made[1].root / "empty"
    folder.mkdir()
    (folder / "run.yaml").write_text(DIGITS)
    assert ask(server, "/api/runs/empty/predict", {"key": "key-of-empty"})[0] == 409


def test_results_are_read_from_what_the_verb_left(server: Running, made: tuple[Running, Board]) -> None:
    board = made[1]
    trained(board, "one")

    def ended(found: dict[str, Any]) -> Path:
        place = board.queue.entries.folder / found["id"]
        claimed(place, Claim(by="keeper", time=now(), process=1 << 22, host="other"))
        (place / "ended.json").write_text(Ended(code=0, time=now()).model_dump_json())
        return place

    _, found = ask(server, "/api/runs/one/predict", {"key": "key-of-results"})
    assert ask(server, f"/api/queue/{found['id']}")[1]["result"] is None, "it waits"
    rows = [{"sample": number, "label": "<b>", "probability": 0.5} for number in range(300)]
    (ended(found) / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, shown = ask(server, f"/api/queue/{found['id']}")
    assert (shown["result"]["total"], len(shown["result"]["rows"])) == (300, 200)
    assert shown["result"]["columns"] == ["sample", "label", "probability"]
    _, table = ask(server, "/" + shown["result"]["csv"])
    assert table.decode().splitlines()[:2] == ["sample,label,probability", "0,<b>,0.5"]
    headers = server.ask("/" + shown["result"]["download"], authorization=f"Bearer {TOKEN}")[1]
    assert headers["content-disposition"].startswith("attachment"), "no page of ours can be made of it"
    _, found = ask(server, "/api/runs/one/evaluate", {"key": "key-of-metrics"})
    (ended(found) / "output.txt").write_text('{"accuracy": 0.5, "loss": null}')
    assert ask(server, f"/api/queue/{found['id']}")[1]["result"] == {"accuracy": 0.5, "loss": None}


def test_a_preview_shows_pictures_classes_and_what_train_would_refuse(server: Running) -> None:
    _, found = ask(server, "/api/data/preview", {"yaml": DIGITS, "rows": 2, "offset": 3})
    assert found["total"] == 1438
    assert sum(each["train"] for each in found["classes"]) == 1438
    assert [each["number"] for each in found["rows"]] == [3, 4]
    head, _, content = found["rows"][0]["picture"].partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(content).startswith(b"\x89PNG")
    assert found["rows"][0]["label"] in {each["name"] for each in found["classes"]}
    status, found = ask(server, "/api/data/preview", {"yaml": DIGITS.replace("digits", "folder")})
    assert status == 422
    assert any("workload.data.train" in each["field"] + each["why"] for each in found["problems"])


def test_a_texts_segments_are_shown_and_both_sides_of_a_pair() -> None:
    one = {"name": "text", "segments": [{"text": "a", "trained": True}], "length": 5, "at_length": True}
    report = {"training samples": 2, "seconds": 1.0, "samples": [{"number": 0, "sides": [one]},
                                                                {"number": 1, "sides": [one, one]}]}  # fmt: skip
    found = previewed(report)
    assert found["rows"][0]["segments"] == one["segments"]
    assert (found["rows"][0]["cut"], found["rows"][0]["sides"]) == (True, None)
    assert found["rows"][1]["sides"] == [one, one]
    assert previewed({**report, "class samples": [{"class": "a", "texts": ["b"]}]})["report"] == found["report"]


def test_fixes_are_the_ways_of_a_plan_that_fit() -> None:
    rows = [
        {"fits": "no", "overrides": ["engine=single"], "step_seconds": None},
        {"fits": "yes", "overrides": ["engine=fsdp", "micro_batch_size=4"], "step_seconds": 0.5},
    ]
    assert fixes({"rows": rows}) == [
        {"set": {"engine": "fsdp", "micro_batch_size": 4}, "says": "engine=fsdp micro_batch_size=4",
         "step_seconds": 0.5}
    ]  # fmt: skip


@pytest.mark.slow
def test_a_run_is_trained_evaluated_predicted_with_and_exported(tmp_path: Path) -> None:
    with serving(tmp_path / "runs", data=[tmp_path]) as (server, board):
        board.queue.change(paused=False)

        def done(found: dict[str, Any]) -> dict[str, Any]:
            end = time.monotonic() + 300
            while True:
                _, entry = ask(server, f"/api/queue/{found['id']}")
                if entry["state"] not in ("queued", "running"):
                    assert entry["state"] == "completed", entry
                    return entry
                assert time.monotonic() < end
                time.sleep(0.3)

        _, planned = ask(server, "/api/plan", {"yaml": DIGITS})
        assert planned["rows"][0]["fits"] == "yes"
        done(ask(server, "/api/queue", {"key": "key-of-training", "yaml": DIGITS + "name: one\n"})[1])
        evaluated = done(ask(server, "/api/runs/one/evaluate", {"key": "key-of-evaluating"})[1])["result"]
        assert 0 <= evaluated["metrics"]["accuracy"] <= 1
        predicted = done(ask(server, "/api/runs/one/predict", {"key": "key-of-predicting"})[1])["result"]
        assert predicted["total"] == 359
        assert {"label", "probability"} <= set(predicted["columns"])
        exported = done(ask(server, "/api/runs/one/export", {"key": "key-of-exporting", "format": "torch-export"})[1])
        assert exported["result"]["verdict"] == "verified"
        assert "model.pt2" in exported["result"]["files"]
        inner = exported["result"]["inner"]
        assert ask(server, f"/api/runs/one/files/{inner}/model.pt2")[0] == 200


def test_two_hundred_long_texts_reach_the_verb_as_they_were_typed(tmp_path: Path) -> None:
    texts = [f"{number} " + "ä" * 19_000 for number in range(200)]
    with serving(tmp_path / "runs") as (server, board):
        trained(board, "one")
        status, found = ask(server, "/api/runs/one/predict", {"key": "key-of-long-texts", "rows": texts})
        assert status == 201
        place = board.queue.entries.folder / found["id"]
        entry = json.loads((place / "entry.json").read_text())
        read = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"
        asked = Asked.model_validate(entry)
        monkey = pytest.MonkeyPatch()
        monkey.setattr(subprocess, "Popen", partial(_popen_of, [sys.executable, "-c", read], subprocess.Popen))
        try:
            keeper._started(place, asked).wait(60)
        finally:
            monkey.undo()
        assert (place / "output.txt").read_text(encoding="utf-8").splitlines() == texts


def _popen_of(command: list[str], real: Any, words: list[str], **given: Any) -> Any:
    assert sum(map(len, words)) < 10_000
    return real(command, **given)


def test_what_runs_beside_training_can_be_ended_by_its_owner(tmp_path: Path) -> None:
    with serving(tmp_path / "runs", USERS) as (server, board):
        trained(board, "one")
        for verb, more in (("evaluate", {}), ("predict", {}), ("export", {"format": "onnx"})):
            found = by(server, "otto", f"/api/runs/one/{verb}", {"key": f"key-of-{verb}", **more})[1]
            place = board.queue.entries.folder / found["id"]
            path = f"/api/queue/{found['id']}/stop"
            assert by(server, "otto", path, {})[1]["error"]["code"] == "not_running", (
                "it waits: it is cancelled instead"
            )
            claimed(place, Claim(by="keeper", time=now(), process=1, host="other"))
            assert by(server, "olga", path, {})[1]["error"]["code"] == "not_yours"
            assert by(server, "otto", path, {})[1]["state"] == "stopping"
            stop = read_stop(place)
            assert stop is not None
            assert (stop.by, stop.now) == ("otto", True)
            (place / "ended.json").write_text(Ended(code=-9, time=now()).model_dump_json())
            shown = by(server, "otto", f"/api/queue/{found['id']}")[1]
            assert (shown["state"], shown["reason"]) == ("interrupted", "ended at once by otto")
            assert by(server, "otto", path, {})[0] == 409
        found = by(server, "otto", "/api/queue", {"key": "key-of-training", "yaml": DIGITS})[1]
        assert by(server, "otto", f"/api/queue/{found['id']}/stop", {})[1]["error"]["code"] == "cannot_stop"


def test_an_end_reaches_the_process(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "board")
    asked = Asked(id="one", digest="", verb="evaluate", run="one", words=["board", "--port", "0", "--runs",
                  str(tmp_path / "inner")], owner="ann", created=now())  # fmt: skip
    queue.add(asked, {})
    queue.start()
    try:
        log = queue.entries.folder / "one" / "log.txt"
        end = time.monotonic() + 120
        while not (log.exists() and "the board is open" in log.read_text()):
            assert time.monotonic() < end
            time.sleep(0.1)
        entry = queue.entries.one("one")
        assert entry is not None
        queue.entries.stop(entry, "ann", at_once=True)
        while (found := queue.entries.one("one")) is not None and found.is_live:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert found is not None
        assert (found.state, found.reason) == ("interrupted", "ended at once by ann")
    finally:
        queue.close()
