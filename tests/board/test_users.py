"""Several users of one board: what a viewer, an operator and an administrator may do."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from drivetrain.board.access import Access, User, digest, read_users
from drivetrain.board.app import Guards, application
from drivetrain.board.audit import Audit
from drivetrain.board.board import OWN, Board
from drivetrain.errors import UserError
from tests.board.boards import DIGITS, TOKEN, TOKENS, USERS, append, by, made, serving, write_run
from tests.running_server import Running

MODULE = "workload: {type: module, path: mine.py}\nbatch_size: 4\nloop: {steps: 1}\n"
FOLDER = "workload: {type: image_classification, model: {config: {model_type: resnet}}, data: {source: folder, train: %s}}\nbatch_size: 4\nloop: {steps: 1}\n"  # noqa: E501


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("board")
    for name in ("data/a", "data/b", "elsewhere/a", "elsewhere/b"):
        (found / name).mkdir(parents=True)
    (found / "mine.py").write_text("")
    return found


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[tuple[Running, Board]]:
    with serving(place / "runs", USERS, data=[place / "data"]) as found:
        yield found


def queued(server: Running, name: str, key: str) -> dict[str, Any]:
    status, found = by(server, name, "/api/queue", {"key": f"key-{name}-{key}", "yaml": DIGITS})
    assert status == 201
    return dict(found)


def test_a_viewer_sees_everything_and_changes_nothing(served: tuple[Running, Board]) -> None:
    server, board = served
    write_run(board.root / "seen")
    entry = queued(server, "otto", "seen")
    for path in ("/api/runs", "/api/runs/seen", "/api/runs/seen/curve", "/api/queue", f"/api/queue/{entry['id']}/log"):
        assert by(server, "vera", path)[0] == 200, path
    assert by(server, "vera", "/api/check", {"yaml": DIGITS})[0] == 200
    _, described = by(server, "vera", "/api/openapi.json")
    looks = {"/login", "/api/logout", "/api/parse", "/api/edit", "/api/check", "/api/command"}
    changing = [(path, method) for path, each in described["paths"].items() for method in each if method != "get"]
    assert len(changing) > 15
    bodies = {"/api/queue": {"key": "key-of-vera", "yaml": DIGITS}, "/api/plan": {"yaml": DIGITS},
              "/api/check/full": {"yaml": DIGITS}, "/api/data/preview": {"yaml": DIGITS},
              "/api/queue/order": {"ids": []}, "/api/runs/{name}/resume": {"key": "key-of-vera"},
              "/api/runs/{name}/export": {"key": "key-of-vera", "format": "onnx"},
              "/api/import": {"files": {"a.yaml": "a: 1"}},
              "/api/comparisons": {"key": "key-of-vera", "yaml": DIGITS, "axes": ["seed=1,2"]},
              "/api/chat": {"key": "key-of-vera", "model": "seen"},
              "/api/chat/{name}/reply": {"messages": [{"role": "user"}]}}  # fmt: skip
    for path, method in changing:
        if path in looks or path == "/api/uploads":
            continue
        body = bodies.get(path, {"key": "key-of-vera"} if path.endswith(("/evaluate", "/predict")) else {})
        status, found = by(server, "vera", path.replace("{name}", "seen"), body, method.upper())
        assert (status, found["error"]["code"]) == (403, "not_allowed"), (path, method)


def test_an_operator_changes_what_is_his_own(served: tuple[Running, Board]) -> None:
    server, board = served
    entry = queued(server, "otto", "own")
    assert by(server, "olga", f"/api/queue/{entry['id']}/cancel", {})[1]["error"]["code"] == "not_yours"
    write_run(board.root / "typed")  # at the command line
    for path, method, body in (("typed", "DELETE", None), ("typed/tags", "POST", {"tags": []}),
                               ("typed/resume", "POST", {"key": "key-of-typed"})):  # fmt: skip
        status, found = by(server, "otto", f"/api/runs/{path}", body, method)
        assert (status, found["error"]["code"]) == (403, "not_yours"), path
    assert (board.root / "typed").exists()
    assert by(server, "otto", "/api/queue/settings", {"paused": False})[1]["error"]["code"] == "not_allowed"
    assert by(server, "otto", f"/api/queue/{entry['id']}/cancel", {})[1]["state"] == "cancelled"
    assert by(server, "anna", "/api/runs/typed", method="DELETE")[0] == 200


def test_the_same_key_of_two_users_is_two_runs(served: tuple[Running, Board]) -> None:
    body = {"key": "a-key-of-both", "yaml": DIGITS}
    ids = {by(served[0], name, "/api/queue", body)[1]["id"] for name in ("otto", "olga")}
    assert len(ids) == 2


@pytest.mark.parametrize("path", ["/api/queue", "/api/check/full", "/api/data/preview", "/api/plan"])
def test_an_operators_run_file_names_no_python_and_nothing_outside_the_data(
    served: tuple[Running, Board], place: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    optimizer = DIGITS.replace("name: sgd", "name: os:system")
    for text, why in ((MODULE, "names Python code"), (optimizer, "names Python code"),
                      (FOLDER % (place / "elsewhere"), "lies outside the folders")):  # fmt: skip
        body = {"yaml": text, **({"key": f"key-{why}-{len(text)}"} if path == "/api/queue" else {})}
        status, found = by(served[0], "otto", path, body)
        assert status == 422, (text, found)
        assert why in str(found["problems"])
    inside = {"yaml": FOLDER % (place / "data"), "key": "key-of-what-is-inside"}
    assert by(served[0], "otto", "/api/queue", inside)[0] in (200, 201)
    assert by(served[0], "anna", "/api/queue", {"yaml": MODULE, "key": "key-of-annas-code"})[0] in (200, 201)


def test_an_administrator_can_allow_code(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    with serving(tmp_path / "runs", USERS, operators_code=True) as (server, _):
        assert by(server, "otto", "/api/queue", {"yaml": MODULE, "key": "key-of-ottos-code"})[0] == 201


def test_what_others_wrote_is_sent_as_text_and_never_as_a_page(served: tuple[Running, Board]) -> None:
    server, board = served
    script = "<script>alert(1)</script>"
    folder = write_run(board.root / script.replace("/", "-"), finished=None)
    append(folder, "warning", message=script)
    (folder / "page.html").write_text(script)
    name = folder.name.replace("<", "%3C").replace(">", "%3E")
    for path, kind in ((f"/api/runs/{name}", "application/json"), (f"/api/runs/{name}/curve", "application/json"),
                       (f"/api/runs/{name}/files/page.html", "application/octet-stream")):  # fmt: skip
        status, headers, _ = server.ask(path, authorization=f"Bearer {TOKENS['vera']}")
        assert (status, headers["content-type"]) == (200, kind)
        assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-disposition"].startswith("attachment")


def test_a_file_of_users_is_read_with_all_that_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "users.txt"
    file.write_text("# our users\nvera viewer a-long-token-of-vera\n\nanna administrator a-long-token-of-anna\n")
    file.chmod(0o600)
    found = read_users(file)
    assert set(found.values()) == {User("vera", "viewer"), User("anna", "administrator")}
    assert Access(found, b"s" * 32, "c").of_token("a-long-token-of-vera", "here").name == "vera"
    file.write_text(
        "vera viewer short\nvera viewer\nadmin viewer a-long-token-of-admin\notto king a-long-token-of-otto\n"
        "a viewer a-long-token-of-both\nb viewer a-long-token-of-both\n"
    )
    file.chmod(0o644)
    with pytest.raises(UserError) as error:
        read_users(file)
    told = [each.why for each in error.value.problems]
    assert len(told) == 6
    assert "other users may read" in told[0]


# --- requests made of the description ------------------------------------------------------------------------------


def _schema() -> Any:
    place = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    root = Path(place, "runs")
    board = made(root)
    write_run(root / "one")
    access = Access({digest(TOKEN): User("admin", "administrator")}, b"s" * 32, "c")
    app = application(board, access, Audit(root / OWN / "audit.jsonl"), Guards(names=["testserver"]))
    return schemathesis.openapi.from_asgi("/api/openapi.json", app, headers=BEARER)


BEARER = {"authorization": f"Bearer {TOKEN}"}
schema = _schema()
SLOW = r"/api/(check/full|data/preview|plan|events)$"  # which start processes, or never end


@schema.exclude(path_regex=SLOW).parametrize()
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_requests_made_of_the_openapi_never_break_the_board(case: Any) -> None:
    response = case.call(headers=BEARER)
    assert response.status_code < 500
    if response.status_code >= 400:
        assert {"message", "type", "param", "code"} == json.loads(response.content)["error"].keys()
