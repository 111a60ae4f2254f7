"""Chat with a trained run: its model is in a process of its own, answers in a stream, and is unloaded when idle."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from drivetrain.board import chat as module
from drivetrain.board.board import Board
from drivetrain.board.chat_memory import weights_bytes
from drivetrain.board.devices import Device, free
from drivetrain.board.entries import claimed, read_stop
from drivetrain.board.records import Claim, Ended, Entry, now
from drivetrain.inference.serve.app import Guards, application
from drivetrain.inference.serve.metrics import Metrics
from drivetrain.inference.serve.served import Served
from drivetrain.web.keys import Keys
from drivetrain.web.limits import Places
from drivetrain.web.server import Address, bound, configured
from tests.board.boards import TOKEN, FixedMachine, ask, serving
from tests.board.test_jobs import trained
from tests.running_server import Running
from tests.scripted_model import scripted


@contextmanager
def model_at(place: Path, answer: str, seconds: float) -> Iterator[Served]:
    """Serves a scripted model at a Unix socket, as `drivetrain serve --unix-socket` does."""
    model, places = scripted(lambda _: answer, seconds=seconds), Places(8)
    served = Served(model, places, Metrics(places))  # type: ignore[arg-type]
    server = uvicorn.Server(configured(application(served, Guards(Keys([]))), 1))
    thread = threading.Thread(target=server.run, args=([bound(Address(unix_socket=place))],))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield served
    finally:
        server.should_exit = True
        thread.join()
        served.close()


def opened(server: Running, board: Board, name: str) -> Entry:
    """A chat whose process seems to run."""
    trained(board, name)
    status, found = ask(server, "/api/chat", {"key": f"key-of-chat-{name}", "model": name})
    assert (status, found["state"], found["ready"]) == (201, "queued", False)
    claimed(board.queue.entries.folder / found["id"], Claim(by="keeper", time=now(), process=1, host="other"))
    entry = board.queue.entries.one(found["id"])
    assert entry is not None
    return entry


def events(content: bytes) -> list[tuple[str, Any]]:
    found = []
    for block in content.decode().replace("\r\n", "\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line.startswith(("event: ", "data: ")))
        if "event" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_an_answer_comes_in_pieces_and_ends_with_its_reason(runtime: Path) -> None:
    with serving(runtime / "runs") as (server, board):
        entry = opened(server, board, "one")
        place = Path(next(word for word in entry.asked.words if word.startswith("--unix-socket=")).split("=", 1)[1])
        assert place.parent.stat().st_mode & 0o777 == 0o700
        assert len(str(place).replace(str(runtime), "/run/user/1000")) < 108
        assert not ask(server, f"/api/chat/{entry.id}")[1]["ready"], "its model is not loaded yet"
        with model_at(place, "Hello there, friend.", 0.0):
            assert ask(server, f"/api/chat/{entry.id}")[1]["ready"]
            body = {"messages": [{"role": "user", "content": "Hi"}], "sampling": {"temperature": 0.0, "seed": 1}}
            _, content = ask(server, f"/api/chat/{entry.id}/reply", body)
            found = events(content)
            assert "".join(data["text"] for name, data in found if name == "piece") == "Hello there, friend."
            assert [name for name, _ in found][-1] == "end"
            assert {"reason": "stop"}.items() <= found[-1][1].items()
            wrong = {"messages": [{"role": "pirate", "content": "Hi"}]}
            [(name, data)] = events(ask(server, f"/api/chat/{entry.id}/reply", wrong)[1])
            assert (name, "role" in data["message"]) == ("failed", True)
        [(name, _)] = events(ask(server, f"/api/chat/{entry.id}/reply", body)[1])
        assert name == "failed", "the model is gone"


def test_an_answer_ends_when_its_page_goes(runtime: Path) -> None:
    with serving(runtime / "runs") as (server, board):
        entry = opened(server, board, "one")
        place = Path(next(word for word in entry.asked.words if word.startswith("--unix-socket=")).split("=", 1)[1])
        with model_at(place, "word " * 2000, 0.01) as served:
            body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]})
            head = (
                f"POST /api/chat/{entry.id}/reply HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {TOKEN}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            import socket

            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as page:
                page.sendall((head + body).encode())
                found = b""
                while b"event: piece" not in found:
                    found += page.recv(1 << 16)
            end = time.monotonic() + 20
            while served.places.taken:
                assert time.monotonic() < end, "the model goes on for nobody"
                time.sleep(0.05)


def test_an_idle_model_is_unloaded_and_a_chat_can_be_closed(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(runtime / "runs") as (server, board):
        entry, folder = opened(server, board, "one"), board.queue.entries.folder
        time.sleep(1.2)  # the board looks at it
        assert read_stop(folder / entry.id) is None
        monkeypatch.setattr(module, "IDLE_SECONDS", 0.1)
        end = time.monotonic() + 20
        while read_stop(folder / entry.id) is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        monkeypatch.undo()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        other = opened(server, board, "two")
        assert ask(server, f"/api/chat/{other.id}", method="DELETE")[1]["state"] == "stopping"
        assert ask(server, f"/api/chat/{other.id}/reply", {"messages": [{"role": "user", "content": "a"}]})[0] == 409
        assert ask(server, "/api/chat/nothing")[0] == 404


def test_a_base_is_asked_beside_its_adapter_by_a_name_of_its_own(runtime: Path) -> None:
    with serving(runtime / "runs") as (server, board):
        trained(board, "one")
        _, found = ask(server, "/api/chat", {"key": "key-of-chat-base", "model": "one", "with_base": True})
        entry = board.queue.entries.one(found["id"])
        assert entry is not None
        assert entry.asked.words[-1] == "--with-base"
        claimed(board.queue.entries.folder / entry.id, Claim(by="keeper", time=now(), process=1, host="other"))
        place = Path(next(word for word in entry.asked.words if word.startswith("--unix-socket=")).split("=", 1)[1])
        body = {"messages": [{"role": "user", "content": "Hi"}], "of_base": True}
        with model_at(place, "Hello.", 0.0):
            [(name, data)] = events(ask(server, f"/api/chat/{entry.id}/reply", body)[1])
        assert name == "failed", "the scripted model has no base"
        assert "there is no model 'base' here" in data["message"]


def test_a_chat_on_the_cpu_starts_beside_another_and_one_on_a_gpu_says_what_it_waits_for(runtime: Path) -> None:
    known = [Device("0", "GPU", 1 << 36), Device("cpu", "CPU", 1 << 34)]
    for kind, starts in (("cpu", True), ("cuda", False)):
        with serving(runtime / kind, machine=FixedMachine(kind)) as (server, board):
            for name in ("one", "two"):
                trained(board, name)
                _, found = ask(server, "/api/chat", {"key": f"key-of-chat-{name}", "model": name})
                if name == "one":
                    place = ["cpu"] if kind == "cpu" else ["0"]
                    claim = Claim(by="keeper", time=now(), process=1, host="other", devices=place)
                    claimed(board.queue.entries.folder / found["id"], claim)
            entry = board.queue.entries.one(found["id"])
            assert entry is not None
            assert (free(entry, board.queue.entries.all(), known) is not None) is starts
            waits = {"for": "paused", "behind": []}
            assert ask(server, f"/api/chat/{entry.id}")[1]["waits"] == waits
            if not starts:
                chats = module.Chats(board)
                board.close()  # so that letting the queue go on starts nothing
                board.queue.change(paused=False)
                held = chats.waits(entry)
                assert held == {"for": "gpu", "behind": [{"verb": "serve", "run": "one"}]}


def test_a_chat_without_room_for_its_weights_is_refused(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(runtime / "runs") as (server, board):
        for name in ("one", "two"):
            engaged = {"global_parameters": 1 << 30, "trained_parameters": 1}
            (trained(board, name) / "report.json").write_text(json.dumps({"engaged": engaged}))

        class Memory:
            total, available = 8 << 30, 6 << 30

        monkeypatch.setattr("psutil.virtual_memory", Memory)
        first = {"key": "key-of-chat-one", "model": "one"}
        assert ask(server, "/api/chat", first)[0] == 201
        status, found = ask(server, "/api/chat", {"key": "key-of-chat-two", "model": "two"})
        assert (status, found["error"]["code"]) == (409, "no_memory"), "the first one's are on their way"
        assert "take 4.0 GiB; this machine has free 2.0 GiB" in found["error"]["message"]
        assert ask(server, "/api/chat", first)[0] == 200, "it is the same one"
        run = board.root / "two" / "run.yaml"
        run.write_text(run.read_text() + "quantised_base: {format: nf4}\n")
        assert weights_bytes(board.root / "two") == 1 << 29


def whole_request(connection: socket.socket) -> None:
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 16)
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length"))
    while len(body) < length:
        body += connection.recv(1 << 16)


@contextmanager
def dying_at(place: Path, closes: bool) -> Iterator[None]:
    """A model's process that sends a part of an answer and then nothing: its socket is closed, or stays open."""
    over = threading.Event()
    chunk = b'data: {"choices": [{"delta": {"content": "Hello"}}]}\n\n'

    def answer() -> None:
        connection, _ = listening.accept()
        with connection:
            whole_request(connection)  # closing before all of it is read resets the connection, and loses the answer
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            connection.sendall(head + f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            if not closes:
                over.wait(60)

    with bound(Address(unix_socket=place)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize("closes", [True, False])
def test_a_model_that_dies_within_an_answer_says_why(runtime: Path, closes: bool) -> None:
    with serving(runtime / "runs") as (server, board):
        entry = opened(server, board, "one")
        folder = board.queue.entries.folder / entry.id
        place = Path(next(word for word in entry.asked.words if word.startswith("--unix-socket=")).split("=", 1)[1])
        (folder / "log.txt").write_text("CUDA out of memory\n")

        def dies() -> None:
            (folder / "ended.json").write_text(Ended(code=-9, time=now()).model_dump_json())

        with dying_at(place, closes):
            threading.Timer(1.0, dies).start()
            begun = time.monotonic()
            _, content = ask(server, f"/api/chat/{entry.id}/reply", {"messages": [{"role": "user", "content": "Hi"}]})
        found = events(content)
        assert time.monotonic() - begun < 30
        assert [name for name, _ in found] == ["piece", "failed"]
        assert found[0][1]["text"] == "Hello"
        assert "the model's process has ended (failed): ended by SIGKILL" in found[1][1]["message"]
        assert "CUDA out of memory" in found[1][1]["message"]
