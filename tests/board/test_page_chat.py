"""The chat's page in a real browser: functions that a model calls. The model's part is written here; chats with trained
models are in test_page_recipes.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.board.boards import write_run
from tests.board.browsing import until, visit

FUNCTIONS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]


def called(number: int, name: str) -> dict[str, Any]:
    arguments = json.dumps({"city": "Basel"})
    return {"index": number, "id": f"call-{number}", "type": "function",
            "function": {"name": name, "arguments": arguments}}  # fmt: skip


def answers(page: Any, pieces: Sequence[dict[str, Any]]) -> list[Any]:
    """Answers in a model's place, question by question; returns the list into which the questions are put."""
    asked: list[Any] = []
    entry = {"id": "x" * 20, "state": "running", "ready": True, "waits": None, "reason": None, "run": "talks"}

    def reply(route: Any) -> None:
        piece = pieces[len(asked)]
        asked.append(route.request.post_data_json)
        end = {"reason": "stop", "tokens": 3, "seconds": 0.1}
        events = f"event: piece\ndata: {json.dumps(piece)}\n\nevent: end\ndata: {json.dumps(end)}\n\n"
        route.fulfill(content_type="text/event-stream", body=events)

    page.route("**/api/chat", lambda route: route.fulfill(json=entry, status=201))
    page.route(f"**/api/chat/{entry['id']}", lambda route: route.fulfill(json=entry))
    page.route("**/reply", reply)
    return asked


def test_an_answer_without_a_word_does_not_end_the_talk(page: Any, folder: Path) -> None:
    write_run(folder / "runs" / "quiet", workload={"type": "language_model", "stage": "sft"})
    asked = answers(page, [{"text": " ", "calls": None}, {"text": "Yes.", "calls": None}])
    visit(page, "#/chat?left=quiet")
    page.click("[data-load]")
    page.wait_for_selector("text=Ready")
    for question in ("Hello?", "Anyone?"):
        page.fill("#message", question)
        page.click("button:has-text('Send')")
        page.wait_for_selector(f".message.user:has-text('{question}') + .message.assistant span.quiet")
    assert asked[1]["messages"] == [{"role": "user", "content": "Anyone?"}]


def test_an_answer_that_the_user_stops_says_so(page: Any, folder: Path) -> None:
    write_run(folder / "runs" / "long", workload={"type": "language_model", "stage": "sft"})
    answers(page, [])
    page.unroute("**/reply")
    page.route("**/reply", lambda _: None)  # it goes on for ever
    visit(page, "#/chat?left=long")
    page.click("[data-load]")
    page.wait_for_selector("text=Ready")
    page.fill("#message", "Count.")
    page.click("button:has-text('Send')")
    page.click("button:has-text('Stop')")
    page.wait_for_selector(".message.assistant:has-text('Stopped')")
    assert page.is_visible("button:has-text('Send')")


def test_a_temperature_that_is_no_number_is_refused_and_not_left_out(page: Any, folder: Path) -> None:
    write_run(folder / "runs" / "warm", workload={"type": "language_model", "stage": "sft"})
    answers(page, [])
    page.unroute("**/reply")
    visit(page, "#/chat?left=warm")
    page.click("[data-load]")
    page.wait_for_selector("text=Ready")
    page.click("summary:has-text('ampling')")
    page.fill("#s-temperature", "0,5")
    page.fill("#message", "What is it like?")
    page.click("button:has-text('Send')")
    refused = page.wait_for_selector("[data-column] .note.bad li").inner_text()
    assert "sampling.temperature" in refused
    assert "0,5" in refused


def test_functions_that_a_model_calls_are_shown_and_given_their_results(page: Any, folder: Path) -> None:
    write_run(folder / "runs" / "talks", workload={"type": "language_model", "stage": "sft"})
    calls = [called(0, "weather"), called(1, "time")]
    asked = answers(page, [{"text": "", "thought": "", "calls": calls}, {"text": "Rain at noon.", "calls": None}])
    visit(page, "#/chat")
    page.select_option("#model-0", "talks")
    page.click("[data-load]")
    page.wait_for_selector("text=Ready")
    page.click("summary:has-text('ampling')")
    page.fill("#tools", "weather")
    page.fill("#message", "What is it like?")
    assert page.is_disabled("button:has-text('Send')"), "that is no list of functions"
    page.fill("#tools", json.dumps(FUNCTIONS))
    page.click("button:has-text('Send')")
    page.wait_for_selector('[data-call]:has-text(\'weather({"city": "Basel"})\')')
    for name, result in (("weather", "rain"), ("time", "noon")):
        page.wait_for_selector(f"#message[placeholder='The result of {name}']")
        page.fill("#message", result)
        page.click("button:has-text('Send')")
    page.wait_for_selector(".message.assistant:has-text('Rain at noon.')")
    page.wait_for_selector("#message[placeholder=Message]")
    until(page, lambda: len(asked) == 2)
    assert [each["tools"] for each in asked] == [FUNCTIONS, FUNCTIONS]
    own = [{"id": each["id"], "type": "function", "function": each["function"]} for each in calls]
    assert asked[1]["messages"] == [
        {"role": "user", "content": "What is it like?"},
        {"role": "assistant", "content": "", "tool_calls": own},
        {"role": "tool", "content": "rain", "tool_call_id": "call-0"},
        {"role": "tool", "content": "noon", "tool_call_id": "call-1"},
    ]
