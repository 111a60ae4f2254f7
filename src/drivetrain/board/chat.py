"""Chat: `drivetrain serve` on one run, as an entry of the queue that listens at a Unix socket which its user alone may
open. It ends after a while without a question."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import os
import socket
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from drivetrain.board.access import User
from drivetrain.board.board import Board
from drivetrain.board.chat_memory import refuse_without_room
from drivetrain.board.devices import CHAT, CPU
from drivetrain.board.entries import id_of
from drivetrain.board.jobs import checkpoint_of, queued
from drivetrain.board.records import Entry
from drivetrain.web.event_stream import event
from drivetrain.web.refusals import Refusal

BASE = "base"  # the name by which `drivetrain serve --with-base` is asked for it
IDLE_SECONDS = 15 * 60  # without a question, after which the model is unloaded
ANSWER_SECONDS = 600
LOOK_SECONDS = 2
END_SECONDS = 3  # until the keeper of a process that ended has written that down
DONE = b"data: [DONE]"
MOST_FOLDER = 90  # of the 107 characters of a socket's path


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Chats:
    """The chats of a board. asked: when each was asked last, by time.monotonic."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._asked: dict[str, float] = {}
        board.queue.watch(self.end_idle)

    def open(
        self, user: User, run: str, key: str, checkpoint: str, devices: list[str] | None, with_base: bool = False
    ) -> tuple[Entry, bool]:
        """Queues a chat with a checkpoint of a run. with_base: whether the same weights answer without its adapter too.
        Raises Refusal (409) where they do not fit into the memory that is free."""
        name = id_of(user.name, key)
        words = [f"--checkpoint={checkpoint_of(self._board, run, checkpoint)}", f"--unix-socket={_socket_of(name)}"]
        if self._board.queue.entries.one(name) is None:
            loading = [each for each in self._live() if not self.is_ready(each)]
            refuse_without_room(self._board, run, [each.asked.run for each in loading])
        return queued(self._board, user, run, key, CHAT, [*words, *(["--with-base"] if with_base else [])], devices)

    def entry(self, name: str) -> Entry:
        """Returns a chat. Raises Refusal (404) for another entry."""
        found = self._board.queue.entries.one(name)
        if found is None or found.asked.verb != CHAT:
            raise Refusal(404, "there is no such chat", "no_chat", "id")
        return found

    def is_ready(self, entry: Entry) -> bool:
        """Returns whether its model answers."""
        if entry.state != "running":
            return False
        connection = UnixConnection(_socket_of(entry.id), LOOK_SECONDS)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def waits(self, entry: Entry) -> dict[str, Any] | None:
        """Returns what a chat waits for: {"for": "paused", "gpu" or "turn", "behind": [verb and run of what holds the
        devices]}; None once it waits no more."""
        if entry.state != "queued" or entry.launch is not None:
            return None
        if self._board.queue.settings.paused:
            return {"for": "paused", "behind": []}
        holding = [each for each in self._board.queue.entries.all() if each.devices and CPU not in each.devices]
        behind = [{"verb": each.asked.verb, "run": each.asked.run} for each in holding]
        return {"for": "gpu", "behind": behind} if entry.asked.device == "cuda" else {"for": "turn", "behind": []}

    def _live(self) -> list[Entry]:
        return [each for each in self._board.queue.entries.all() if each.asked.verb == CHAT and each.is_live]

    def close(self, entry: Entry, by: str) -> None:
        """Unloads the model, or takes a chat that waits out of the queue."""
        entries = self._board.queue.entries
        if entry.state == "queued" and entries.cancel(entry, by):
            return
        if entry.is_live:
            entries.stop(entry, by, at_once=False)

    def end_idle(self) -> None:
        """Unloads the models that were not asked for a while."""
        now = time.monotonic()
        for entry in self._board.queue.entries.all():
            is_loaded = entry.asked.verb == CHAT and entry.state == "running"
            if is_loaded and now - self._asked.setdefault(entry.id, now) > IDLE_SECONDS:
                self.close(entry, "the board: it was idle")

    async def reply(self, entry: Entry, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """Yields events: `piece` {text}, then `end` {reason, tokens, seconds}, or `failed` {message}. A client that
        goes ends the answer, since the connection to the model is closed with this generator."""
        self._asked[entry.id] = begun = time.monotonic()
        connection = UnixConnection(_socket_of(entry.id), ANSWER_SECONDS)
        try:
            response = await asyncio.to_thread(_begun, connection, body)
            if response.status != 200:
                told = json.loads(await asyncio.to_thread(response.read))
                yield event(json.dumps({"message": told["error"]["message"]}), "failed")
                return
            reason, tokens, is_whole = None, None, False
            while line := await self._line(entry, response):
                is_whole = is_whole or line.strip() == DONE
                found = _data(line)
                if found is None:
                    continue
                if "error" in found:
                    yield event(json.dumps({"message": found["error"]["message"]}), "failed")
                    return
                tokens = (found.get("usage") or {}).get("completion_tokens", tokens)
                for choice in found.get("choices", []):
                    reason = choice.get("finish_reason") or reason
                    delta = choice["delta"]
                    piece = {"text": delta.get("content") or "", "thought": delta.get("reasoning_content") or ""}
                    calls = delta.get("tool_calls")
                    if any(piece.values()) or calls:
                        yield event(json.dumps({**piece, "calls": calls}), "piece")
            if not is_whole:
                raise http.client.IncompleteRead(b"")
            seconds = time.monotonic() - begun
            yield event(json.dumps({"reason": reason, "tokens": tokens, "seconds": seconds}), "end")
        except (OSError, http.client.HTTPException) as error:
            message = await asyncio.to_thread(self._why_cut, entry.id, error)
            yield event(json.dumps({"message": message}), "failed")
        finally:
            self._asked[entry.id] = time.monotonic()
            with contextlib.suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
            connection.close()

    async def _line(self, entry: Entry, response: http.client.HTTPResponse) -> bytes:
        """Returns the next line of an answer; b"" at its end. Raises ConnectionError once the model's process has
        ended: what it started may hold its socket open, and say nothing more."""
        reading = asyncio.ensure_future(asyncio.to_thread(response.readline))
        try:
            while True:
                done, _ = await asyncio.wait([reading], timeout=LOOK_SECONDS)
                if done:
                    return reading.result()
                if not self.entry(entry.id).is_live:
                    raise ConnectionError("its process has ended")
        finally:
            reading.add_done_callback(lambda each: each.cancelled() or each.exception())  # asyncio logs unread ones

    def _why_cut(self, name: str, error: Exception) -> str:
        """Returns why an answer ended before its end. Its keeper writes down how the process ended a moment later."""
        for _ in range(int(END_SECONDS / 0.1)):
            entry = self._board.queue.entries.one(name)
            if entry is None or not entry.is_live:
                state, reason = ("gone", None) if entry is None else (entry.state, entry.reason)
                return f"the model's process has ended ({state})" + (f": {reason}" if reason else "")
            time.sleep(0.1)
        is_cut = isinstance(error, http.client.IncompleteRead)
        return f"the model does not answer: {'it closed the connection before its end' if is_cut else error}"


def _begun(connection: UnixConnection, body: dict[str, Any]) -> http.client.HTTPResponse:
    sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"content-type": "application/json", "host": "localhost"}
    connection.request("POST", "/v1/chat/completions", json.dumps(sent), headers)
    return connection.getresponse()


def _data(line: bytes) -> dict[str, Any] | None:
    """Returns the object of a line of server-sent events; None for other lines."""
    text = line.decode("utf-8", "replace").strip().removeprefix("data: ")
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        return found if isinstance(found, dict) else None
    return None


def _socket_of(name: str) -> Path:
    """Returns the place of a chat's socket: in a folder of the user's own where temporary files lie, or in /tmp where
    that path is longer than a Unix socket's may be."""
    own = f"drivetrain-board-{os.getuid()}"
    usual = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    folder = (usual if len(str(usual / own)) <= MOST_FOLDER else Path("/tmp")) / own
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink() or folder.stat().st_mode & 0o077:
        raise Refusal(500, f"{folder} is another user's, or open to others", "socket_folder")
    return folder / hashlib.sha256(name.encode()).hexdigest()[:16]
