"""POST /v1/responses: OpenAI's newer API, without stored conversations."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from pydantic import Field

from drivetrain.errors import shown
from drivetrain.generation.requests import Answer
from drivetrain.inference.serve.answering import Group
from drivetrain.inference.serve.chat import Choice, Dialogue, dialogue
from drivetrain.inference.serve.fields import AnswerFields
from drivetrain.inference.serve.messages import MOST_MESSAGES, ToolChoice, Tools, constraint_of, offered
from drivetrain.inference.serve.served import Served
from drivetrain.web.event_stream import event
from drivetrain.web.refusals import Refusal

TEXTS = ("input_text", "output_text", "text")


class ResponsesRequest(AnswerFields):
    """The body of a request for a response."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: Tools = None
    tool_choice: ToolChoice = None
    text: dict[str, Any] | None = Field(None, description="{format: {type: text, json_object or json_schema, ...}}")


def prepared(served: Served, body: ResponsesRequest) -> Dialogue:
    """Reads and tokenises what a response answers. Raises Refusal."""
    if body.choices > 1:
        raise Refusal(400, "a response is one answer: leave n out", "invalid_request", "n")
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    given = body.input
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else _messages(given)
    text = body.text or {}
    if unknown := sorted(text.keys() - {"format", "verbosity"}):
        raise Refusal(400, f"text has the unknown field {unknown[0]}", "invalid_request", "text")
    if text.get("verbosity") not in (None, "medium"):
        why = f"text.verbosity={shown(text['verbosity'])} is not supported: leave it out"
        raise Refusal(400, why, "invalid_request", "text.verbosity")
    functions = offered(body.tools, body.tool_choice)
    constraint = constraint_of(text.get("format"), "text.format")
    return dialogue(served, [*system, *messages], body, functions, constraint, body.max_output_tokens)


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages that a list of items makes up; calls that follow each other are of one message."""
    found: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            found.append({"role": item.get("role"), "content": _text(item.get("content"), place)})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if found and "tool_calls" in found[-1]:
                found[-1]["tool_calls"].append(call)
            else:
                found.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            found.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"), place)}
            )
        elif kind != "reasoning":  # an earlier reply's thoughts, which templates leave out
            why = f"input[{place}] is of type {shown(kind)}; known are message, function_call, function_call_output"
            raise Refusal(400, why, "invalid_input", "input")
    return found


def _text(content: Any, place: int) -> Any:
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in TEXTS or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise Refusal(
                400, f"input[{place}] has a part of type {shown(kind)}: texts are read", "invalid_input", "input"
            )
    return "".join(part["text"] for part in content)


class Response:
    """The response as it grows, in the form of the API."""

    def __init__(self, served: Served, body: ResponsesRequest, asked: Dialogue) -> None:
        self._asked, self.choice = asked, Choice(asked)
        self._head = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model or served.name,
            "instructions": body.instructions,
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "max_output_tokens": body.max_output_tokens,
            "previous_response_id": None,
            "store": False,
            "error": None,
        }
        self.output: list[dict[str, Any]] = []

    def body(self, status: str, reason: str | None = None, tokens: int | None = None) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if reason == "length" else None
        usage = None
        if tokens is not None:
            prompt = len(self._asked.prompt)
            usage = {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + tokens,
            }
        return {**self._head, "status": status, "incomplete_details": cut, "output": self.output, "usage": usage}


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def message(number: str, status: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [part(text)]
    return {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": status, "content": content}


def called(call: Mapping[str, Any], status: str, arguments: str) -> dict[str, Any]:
    name = call["function"]["name"]
    own = {"id": f"fc_{call['id'].removeprefix('call_')}", "type": "function_call", "call_id": call["id"]}
    return {**own, "name": name, "arguments": arguments, "status": status}


def thoughts(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{secrets.token_hex(16)}", "type": "reasoning", "summary": [], "content": content}


def whole(served: Served, body: ResponsesRequest, asked: Dialogue, answers: Sequence[Answer]) -> dict[str, Any]:
    """Returns the body of the response."""
    [answer] = answers
    made = Response(served, body, asked)
    made.choice.add(answer.text, is_last=True)
    choice = made.choice
    if choice.thought:
        made.output.append(thoughts(choice.thought))
    if choice.text or not choice.calls:
        made.output.append(message(secrets.token_hex(16), "completed", choice.text))
    made.output += [called(call, "completed", call["function"]["arguments"]) for call in choice.calls]
    is_cut = answer.finish_reason == "length"
    return made.body("incomplete" if is_cut else "completed", answer.finish_reason, len(answer.tokens))


async def streamed(
    served: Served, body: ResponsesRequest, asked: Dialogue, group: Group
) -> AsyncGenerator[bytes, None]:
    """Yields the events of the response."""
    stream = _Events(Response(served, body, asked))
    for name in ("response.created", "response.in_progress"):
        yield stream.event(name, response=stream.made.body("in_progress"))
    tokens, reason = 0, None
    async with aclosing(group.pieces()) as pieces:
        async for _, piece in pieces:
            tokens += len(piece.tokens)
            reason = piece.finish_reason
            for delta in stream.made.choice.add(piece.text, reason is not None):
                for each in stream.of(delta):
                    yield each
    for each in stream.ended():
        yield each
    status = "incomplete" if reason == "length" else "completed"
    yield stream.event(f"response.{status}", response=stream.made.body(status, reason, tokens))


class _Events:
    """The events of one response. A text item is open from its first character until a call or the end."""

    def __init__(self, made: Response) -> None:
        self.made = made
        self._number, self._text, self._thought = 0, "", ""
        self._opened: str | None = None  # the number of the text item that is open

    def event(self, kind: str, /, **fields: Any) -> bytes:
        self._number += 1
        return event(json.dumps({"type": kind, "sequence_number": self._number - 1, **fields}), kind)

    def of(self, delta: Mapping[str, Any]) -> list[bytes]:
        if "tool_calls" in delta:
            return [*self._close(), *self._call(delta["tool_calls"][0])]
        if "reasoning_content" in delta:
            self._thought += delta["reasoning_content"]
            return []
        found = [] if self._opened else self._open()
        self._text += delta["content"]
        return [*found, self.event("response.output_text.delta", **self._place(), delta=delta["content"], logprobs=[])]

    def ended(self) -> list[bytes]:
        """Returns what closes the items; a reply without text and calls has an empty text."""
        if self._opened or self.made.output:
            return self._close()
        return [*self.of({"content": ""}), *self._close()]

    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._opened}", "output_index": len(self.made.output), "content_index": 0}

    def _open(self) -> list[bytes]:
        thought = self._think()
        self._opened, self._text = secrets.token_hex(16), ""
        item = message(self._opened, "in_progress", None)
        return [
            *thought,
            self.event("response.output_item.added", output_index=len(self.made.output), item=item),
            self.event("response.content_part.added", **self._place(), part=part("")),
        ]

    def _think(self) -> list[bytes]:
        if not self._thought:
            return []
        index, item = len(self.made.output), thoughts(self._thought)
        self._thought = ""
        self.made.output.append(item)
        names = ("response.output_item.added", "response.output_item.done")
        return [self.event(name, output_index=index, item=item) for name in names]

    def _close(self) -> list[bytes]:
        if not self._opened:
            return self._think()
        index, item, place = len(self.made.output), message(self._opened, "completed", self._text), self._place()
        self._opened = None
        self.made.output.append(item)
        return [
            self.event("response.output_text.done", **place, text=self._text, logprobs=[]),
            self.event("response.content_part.done", **place, part=part(self._text)),
            self.event("response.output_item.done", output_index=index, item=item),
        ]

    def _call(self, call: Mapping[str, Any]) -> list[bytes]:
        index, arguments = len(self.made.output), call["function"]["arguments"]
        item = called(call, "completed", arguments)
        self.made.output.append(item)
        place = {"item_id": item["id"], "output_index": index}
        return [
            self.event("response.output_item.added", output_index=index, item=called(call, "in_progress", "")),
            self.event("response.function_call_arguments.delta", **place, delta=arguments),
            self.event("response.function_call_arguments.done", **place, arguments=arguments, name=item["name"]),
            self.event("response.output_item.done", output_index=index, item=item),
        ]
