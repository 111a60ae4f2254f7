"""The message at the end: once for each entry, to the administrator's address and nowhere else."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from drivetrain.board.entries import Entries, claimed
from drivetrain.board.notify import Notifier, check_address
from drivetrain.board.records import Claim, Ended, now
from drivetrain.cli.app import app
from drivetrain.errors import UserError
from tests.board.test_queue import until, waiting


@contextmanager
def receiver(answers: list[int]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Listens, answers with these statuses and then with 200, and keeps (path, message) of what came."""
    got: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            got.append((self.path, json.loads(content)))
            self.send_response(answers.pop(0) if answers else 200)
            self.send_header("location", "/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/hook?a=b", got
        finally:
            server.shutdown()
            thread.join()


def end(entries: Entries, name: str, code: int = 0, **given: Any) -> None:
    folder = entries.folder / waiting(entries, name, **given).id
    claimed(folder, Claim(by="keeper", time=now(), process=1 << 22, host="other"))
    (folder / "ended.json").write_text(Ended(code=code, time=now()).model_dump_json())


@contextmanager
def notifying(entries: Entries, address: str) -> Iterator[Callable[[], None]]:
    found = Notifier(entries, address)
    try:
        yield found.look
    finally:
        found.close()


def test_each_end_is_told_once_also_after_a_restart(tmp_path: Path) -> None:
    entries = Entries(tmp_path / "entries")
    end(entries, "one")
    end(entries, "talk", verb="serve")
    waiting(entries, "still")
    with receiver([]) as (address, got):
        with notifying(entries, address) as look:
            look()
            end(entries, "two", code=1)
            look()
            look()
            until(lambda: len(got) == 2)
            until(lambda: (entries.folder / "two" / "notified").exists())
        with notifying(Entries(tmp_path / "entries"), address) as look:
            look()
            time.sleep(0.3)
    assert [(path, each["run"], each["state"]) for path, each in got] == [
        ("/hook?a=b", "one", "completed"),
        ("/hook?a=b", "two", "failed"),
    ]
    assert got[1][1]["text"].startswith("two: train failed")


def test_a_redirect_is_not_followed_and_a_failure_is_tried_again(tmp_path: Path) -> None:
    entries = Entries(tmp_path / "entries")
    end(entries, "one")
    with receiver([302, 500]) as (address, got), notifying(entries, address) as look:
        look()
        until(lambda: (entries.folder / "one" / "notified").exists())
    assert [path for path, _ in got] == ["/hook?a=b"] * 3


@pytest.mark.parametrize(
    ("address", "why"),
    [
        *(("file:///etc/passwd", "begins with file"), ("ftp://a/b", "begins with ftp"), ("example.org", "no scheme")),
        *(("https://", "no host"), ("http:///path", "no host"), ("http://:80/x", "no host"), ("gopher://a", "gopher")),
        *(("http://host:99999", "0-65535"), ("http://host:x/y", "'x'"), ("http://host:0", "port 0")),
        *(("http://[::1/x", "IPv6"), ("http://a b/", "space"), ("http://me:secret@host/", "user's name")),
    ],
)
def test_only_addresses_of_the_web_are_taken(address: str, why: str) -> None:
    with pytest.raises(UserError, match="no address") as error:
        check_address(address)
    [problem] = error.value.problems
    assert problem.field == "--webhook"
    assert why in problem.why


def test_usual_addresses_are_taken() -> None:
    for address in ("https://chat.example.org/hooks/a?b=c", "http://127.0.0.1:8080", "http://[::1]:80/x"):
        check_address(address)


def test_a_board_with_a_wrong_webhook_does_not_start(tmp_path: Path) -> None:
    words = ["board", "--runs", str(tmp_path / "runs"), "--data", str(tmp_path), "--port", "0"]
    found = CliRunner().invoke(app, [*words, "--webhook", "http://host:99999"])
    assert isinstance(found.exception, UserError)
    assert not (tmp_path / "runs").exists()
