"""One stream for all runs: a snapshot, then what changes, and after a lost connection what was missed."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.board import queue
from drivetrain.board.board import Board
from tests.board.boards import DIGITS, TOKEN, ask, made, point, serving, write_run


def taken(board: Board, after: str | None, count: int) -> list[tuple[str, str, Any]]:
    """Returns (id, name, data) of events."""

    async def take() -> list[bytes]:
        events = board.feed.events(after)
        found = [await asyncio.wait_for(anext(events), 20) for _ in range(count)]
        await events.aclose()
        return found

    return [parsed(each.decode()) for each in asyncio.run(take())]


def parsed(text: str) -> tuple[str, str, Any]:
    fields = dict(line.split(": ", 1) for line in text.strip().splitlines())
    return fields["id"], fields["event"], json.loads(fields["data"])


def test_a_page_gets_a_snapshot_and_then_only_what_changed(tmp_path: Path) -> None:
    board = made(tmp_path / "runs")
    write_run(board.root / "one", finished=None)
    write_run(board.root / "two")
    [(first, name, data)] = taken(board, None, 1)
    assert name == "snapshot"
    assert {each["name"] for each in data["runs"]} == {"one", "two"}
    assert data["queue"]["settings"]["paused"]
    point(board.root / "one", 31)
    board.feed.look()
    [(second, name, data)] = taken(board, first, 1)
    assert (name, [each["step"] for each in data["changed"]]) == ("runs", [31])
    board.runs.delete("two")
    board.feed.look()
    [(_, name, data)] = taken(board, second, 1)
    assert (name, data["gone"], data["changed"]) == ("runs", ["two"], [])


def test_what_was_missed_comes_first_and_an_unknown_number_gives_a_snapshot(tmp_path: Path) -> None:
    board = made(tmp_path / "runs")
    write_run(board.root / "one", finished=None)
    [(first, _, _)] = taken(board, None, 1)
    for step in (31, 32):
        point(board.root / "one", step)
        board.feed.look()
    assert [data["changed"][0]["step"] for _, _, data in taken(board, first, 2)] == [31, 32]
    for unknown in ("other-1", first.split("-")[0] + "-99", "", "x", first + "9" * 30):
        assert taken(board, unknown, 1)[0][1] == "snapshot"


def test_a_started_board_streams_over_http_and_ends_when_the_page_goes(tmp_path: Path) -> None:
    with serving(tmp_path / "runs") as (server, board):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as page:
            head = f"GET /api/events HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {TOKEN}\r\n\r\n"
            page.sendall(head.encode())
            found = b""
            while b"event: snapshot" not in found:
                found += page.recv(1 << 16)
            assert b"content-type: text/event-stream" in found
            ask(server, "/api/queue", {"key": "the-key-of-a-form", "yaml": DIGITS})
            while b"event: queue" not in found:
                found += page.recv(1 << 16)
        end = time.monotonic() + 10
        while board.feed._listening:
            assert time.monotonic() < end, "a page that has gone is listened for no more"
            time.sleep(0.05)


def test_a_disk_that_runs_low_is_told_and_its_free_bytes_alone_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = made(tmp_path / "runs")
    room = [100 << 30]
    monkeypatch.setattr(queue.shutil, "disk_usage", lambda _: SimpleNamespace(free=room[0]))
    [(first, _, data)] = taken(board, None, 1)
    assert data["queue"]["disk"] == {"free_bytes": 100 << 30, "is_low": False}
    room[0] -= 1 << 20
    board.feed.look()
    room[0] = 1 << 30
    board.feed.look()
    [(_, name, data)] = taken(board, first, 1)
    assert (name, data["disk"]) == ("queue", {"free_bytes": 1 << 30, "is_low": True})
