"""The server limits its answers, in number and in time, and is started with options that have an effect."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from drivetrain.cli.serve import adapters_of
from drivetrain.errors import UserError
from drivetrain.generation.requests import Request
from drivetrain.inference.loading import LoadedModel
from drivetrain.inference.serve import start
from drivetrain.web.keys import Keys
from drivetrain.web.server import Address
from tests.running_server import serving
from tests.scripted_model import scripted

CHAT = "/v1/chat/completions"


def test_a_request_has_its_place_and_its_time_before_its_prompt_is_read() -> None:
    found: list[int] = []
    body = {"messages": [{"role": "user", "content": "Hello"}], "seed": 1}
    with serving(most=1, seconds=1) as server:
        assert server.served is not None
        busy = threading.Event()
        server.served._texts.submit(busy.wait, 20)  # another's long prompt
        late = threading.Thread(target=lambda: found.append(server.ask(CHAT, body)[0]))
        late.start()
        while not server.served.places.taken:
            assert late.is_alive()
            time.sleep(0.01)
        status, _, refused = server.ask(CHAT, body)
        assert (status, refused["error"]["code"]) == (429, "queue_full")
        late.join()
        busy.set()
        assert found == [504]
        server.settled()
        assert server.ask(CHAT, body)[0] == 200
        assert len(server.model.generator.requests) == 1, "what was late is not answered"


def test_a_complete_answer_does_not_wait_for_the_prompts_of_others() -> None:
    busy = threading.Event()

    def script(_: Request) -> str:
        assert server.served is not None
        server.served._texts.submit(busy.wait, 20)
        return "done"

    with serving(scripted(script)) as server:
        try:
            body = {"messages": [{"role": "user", "content": "Hello"}]}
            assert server.ask(CHAT, body)[2]["choices"][0]["message"]["content"] == "done"
        finally:
            busy.set()


def test_the_host_by_which_a_server_is_started_is_one_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    guards: list[Any] = []
    monkeypatch.setattr(start, "application", lambda _, given: guards.append(given))
    monkeypatch.setattr(start, "run", lambda *_: None)
    model = LoadedModel("mine", *[cast(Any, scripted().generator)] * 2, None, None)
    address = Address("gpu7.example.org")
    start.serve(model, cast(Any, None), address, Keys(["key"]), ["other"], start.Limits(), lambda: None)
    assert guards[0].names == ["other", "gpu7.example.org"]


def test_adapters_of_the_command_line_are_names_and_folders() -> None:
    assert adapters_of(["a=x", "b=y=z"]) == {"a": Path("x"), "b": Path("y=z")}
    with pytest.raises(UserError) as refused:
        adapters_of(["a", "=x", "a.b=x", "b=x", "b=y"])
    assert len(refused.value.problems) == 4


def test_a_text_that_no_tokens_would_fit_is_refused_before_it_is_tokenised() -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("it was tokenised")

    model, long = scripted(), "a" * 100_000
    model.chat_ids, model.text_ids = never, never  # type: ignore[method-assign]
    with serving(model) as server:
        bodies = {CHAT: {"messages": [{"role": "user", "content": long}]}, "/v1/completions": {"prompt": long}}
        for path, body in bodies.items():
            status, _, found = server.ask(path, body)
            assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
            assert "the prompt has 100,000" in found["error"]["message"]
