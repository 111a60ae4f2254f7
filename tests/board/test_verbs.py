"""Checks, previews and plans: few run or wait at once, so that the board answers others, and ends when it is to."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import Response

from drivetrain.board import verbs as module
from drivetrain.board.verbs import AT_ONCE, MOST_WAITING, VerbProcess
from drivetrain.web.refusals import Refusal
from drivetrain.web.server import Address, Server, bound, configured
from tests.board.boards import DIGITS
from tests.board.test_queue import until

SLEEPS = (sys.executable, "-c", "import time; time.sleep(100)")
ANSWERS = (sys.executable, "-c", "print('{}')")


@pytest.fixture
def verbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VerbProcess:
    monkeypatch.setattr(module, "COMMAND", SLEEPS)
    return VerbProcess(tmp_path)


def asked(pool: ThreadPoolExecutor, verbs: VerbProcess, caller: str) -> Future[dict[str, Any]]:
    return pool.submit(verbs.data, caller, DIGITS, 1, 0, False)


def refusal(answer: Future[dict[str, Any]]) -> tuple[int, str]:
    error = answer.exception(30)
    assert isinstance(error, Refusal)
    return error.status, error.code


def test_many_requests_of_one_user_hold_few_threads_and_the_newest_counts(verbs: VerbProcess) -> None:
    with ThreadPoolExecutor(30) as pool:
        others = [asked(pool, verbs, name) for name in "ab"]
        until(lambda: len(verbs._running) == AT_ONCE)
        answers = []
        for _ in range(20):
            answers.append(asked(pool, verbs, "otto"))
            until(lambda: verbs._waiting == 1)
            until(lambda: sum(not each.done() for each in answers) == 1)
        assert {refusal(each) for each in answers[:-1]} == {(409, "superseded")}
        assert not any(each.done() for each in [*others, answers[-1]])
        verbs.close()
        assert {refusal(each) for each in [*others, answers[-1]]} == {(503, "closing")}


def test_more_than_a_few_that_wait_are_refused_at_once_with_the_reason(
    verbs: VerbProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(30) as pool:
        answers = [asked(pool, verbs, f"user {number}") for number in range(AT_ONCE + MOST_WAITING)]
        until(lambda: verbs._waiting == MOST_WAITING and len(verbs._running) == AT_ONCE)
        begun = time.monotonic()
        with pytest.raises(Refusal, match=f"{MOST_WAITING} checks, previews and plans wait") as error:
            verbs.data("one more", DIGITS, 1, 0, False)
        assert time.monotonic() - begun < 5
        assert (error.value.status, error.value.headers) == (503, {"retry-after": "5"})
        monkeypatch.setattr(module, "COMMAND", ANSWERS)
        for process in [*verbs._running.values()]:
            process.kill()
        assert [each.exception(60) is None for each in answers].count(True) == MOST_WAITING, "each in its turn"
    assert not verbs._turns
    assert not verbs._running
    assert (verbs._taken, verbs._waiting) == (0, 0)


def test_a_newer_request_takes_the_place_of_one_that_runs(verbs: VerbProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(4) as pool:
        first = asked(pool, verbs, "otto")
        until(lambda: len(verbs._running) == 1)
        monkeypatch.setattr(module, "COMMAND", ANSWERS)
        second = asked(pool, verbs, "otto")
        assert refusal(first) == (409, "superseded")
        assert second.result(30)["seconds"] > 0


def test_a_process_that_the_system_kills_is_no_newer_request(verbs: VerbProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = asked(pool, verbs, "otto")
        until(lambda: len(verbs._running) == 1)
        verbs._running["data otto"].kill()
        assert refusal(answer) == (500, "failed")


def test_what_a_check_has_shown_so_far_is_known_while_it_works(
    verbs: VerbProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = r'{"next": "data"}\n{"next": "plan"}\n{"next'
    shows = f"import time; print('{parts}', flush=True, end=''); time.sleep(100)"
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", shows))
    with ThreadPoolExecutor(1) as pool:
        assert verbs.checked_so_far("otto") is None
        answer = pool.submit(verbs.check, "otto", DIGITS, "run")
        until(lambda: verbs.checked_so_far("otto") == {"next": "plan"})
        assert verbs.checked_so_far("olga") is None
        whole = """print('{"next": "data"}'); print('{"next": null, "ready": true}')"""
        monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", whole))
        newer = pool.submit(verbs.check, "otto", DIGITS, "run")
        verbs._running["check otto"].kill()
        assert refusal(answer)[1] == "failed"
        assert newer.result(30)["ready"] is True
    assert verbs.checked_so_far("otto") is None


def test_the_end_of_a_server_does_not_wait_for_previews(verbs: VerbProcess) -> None:
    app = FastAPI()

    @app.get("/preview")
    def preview() -> Response:
        verbs.data("otto", DIGITS, 1, 0, False)
        return Response()

    listening = bound(Address(port=0))
    server = Server(configured(app, 1), lambda: None, verbs.close)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    until(lambda: server.started)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_get, listening.getsockname()[1])
        until(lambda: len(verbs._running) == 1)
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def _get(port: int) -> None:
    import socket

    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"GET /preview HTTP/1.1\r\nhost: localhost\r\n\r\n")
        connection.recv(1 << 16)
