"""Uploads to a hub, against a server of this machine that answers as the hub's interface does."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drivetrain.errors import RunError, UserError
from drivetrain.export.publishing import Hub

TOKEN = "hf_a_token_that_is_written_nowhere"


class Answers(BaseHTTPRequestHandler):
    """The hub's interface, as far as an upload of small files asks for it."""

    files: ClassVar[dict[str, bytes]] = {}
    made: ClassVar[list[dict[str, Any]]] = []
    refuses: ClassVar[int] = 0  # a status for commits

    def do_GET(self) -> None:
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/whoami-v2":
            self._answer(200, {"name": "ada", "type": "user", "orgs": []})
        else:
            self._answer(200, {"id": "ada/model", "sha": "0" * 40, "siblings": [], "private": True, "tags": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/api/repos/create":
            self.made.append(json.loads(body))
            self._answer(200, {"url": f"http://{self.headers['host']}/ada/model", "id": "1"})
        elif "/preupload/" in self.path:
            paths = [each["path"] for each in json.loads(body)["files"]]
            files = [{"path": each, "uploadMode": "regular", "shouldIgnore": False} for each in paths]
            self._answer(200, {"files": files})
        elif self.refuses:
            self._answer(self.refuses, {"error": "no"})
        else:
            for line in body.splitlines():
                each = json.loads(line)
                if each["key"] == "file":
                    self.files[each["value"]["path"]] = base64.b64decode(each["value"]["content"])
            at = f"http://{self.headers['host']}/ada/model/commit/{'0' * 40}"
            self._answer(200, {"commitUrl": at, "commitOid": "0" * 40, "success": True})

    def _answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Answers]]:
    Answers.files.clear()
    Answers.made.clear()
    Answers.refuses = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield Answers
    server.shutdown()
    server.server_close()
    thread.join()


def is_private(made: dict[str, Any]) -> bool:
    """Returns what a request for a repository asks for, in the words of huggingface_hub before and since 2.0."""
    return bool(made.get("private")) or made.get("visibility") == "private"


def exported(folder: Path) -> Path:
    (folder / "out").mkdir()
    (folder / "out" / "config.json").write_text("{}")
    (folder / "out" / "model.safetensors").write_bytes(bytes(range(256)))
    return folder / "out"


def test_all_files_of_an_export_are_one_commit_of_a_private_repository(
    hub: type[Answers], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    address = Hub("ada/model").upload(exported(tmp_path))
    assert address.endswith("/ada/model")
    assert hub.files == {"config.json": b"{}", "model.safetensors": bytes(range(256))}
    (made,) = hub.made
    assert (made["name"], made["organization"], is_private(made)) == ("model", "ada", True)
    captured = capfd.readouterr()
    assert TOKEN not in captured.out + captured.err


def test_a_public_repository_is_public(hub: type[Answers], tmp_path: Path) -> None:
    Hub("ada/model", public=True).upload(exported(tmp_path))
    assert not is_private(hub.made[0])


def test_a_hub_that_refuses_leaves_the_export_and_says_how_to_go_on(hub: type[Answers], tmp_path: Path) -> None:
    given, folder = Hub("ada/model"), exported(tmp_path)
    hub.refuses = 403
    with pytest.raises(RunError, match="did not take it: 403") as error:
        given.upload(folder)
    assert f"hf upload ada/model {folder}" in str(error.value)
    assert (folder / "config.json").exists()


@pytest.mark.usefixtures("hub")
def test_what_cannot_work_is_said_before_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, why in (("model", "was given"), ("ada/a b", "no repository's name"), ("a/b/c", "was given")):
        with pytest.raises(UserError, match=why):
            Hub(name)
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    with pytest.raises(UserError, match="refuses the token"):
        Hub("ada/model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        Hub("ada/model")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UserError, match="does not answer"):
        Hub("ada/model")


def test_without_a_token_nothing_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(UserError, match="no token"):
        Hub("ada/model")
