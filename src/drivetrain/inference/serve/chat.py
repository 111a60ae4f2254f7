"""POST /v1/chat/completions."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic import Field, model_validator

from drivetrain.generation.replies import THINK, Form, Part, ReplyReader
from drivetrain.generation.requests import Answer, Piece, Request
from drivetrain.inference.serve.answering import Group
from drivetrain.inference.serve.fields import AnswerFields
from drivetrain.inference.serve.logprobs import TokenTexts, chat_logprobs
from drivetrain.inference.serve.messages import (
    Messages,
    ToolChoice,
    Tools,
    check_texts,
    constraint_of,
    offered,
    prompt_ids,
    read_messages,
)
from drivetrain.inference.serve.served import Served
from drivetrain.web.event_stream import event
from drivetrain.web.refusals import Refusal


class ChatRequest(AnswerFields):
    """The body of a request for chat completions."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=1, description="The older name of max_completion_tokens.")
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Tools = None
    tool_choice: ToolChoice = None
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is for logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        return self


@dataclass(frozen=True)
class Dialogue:
    """A conversation that is ready to be answered. thinking: whether the reply begins within a thought, which the
    prompt opened; a reply in a form has no thought."""

    prompt: tuple[int, ...]
    requests: Sequence[Request]
    form: Form | None
    thinking: bool
    is_forced: bool  # the reply is a call and nothing else

    def reader(self) -> ReplyReader:
        return ReplyReader("bare" if self.is_forced else self.form, self.thinking)


def prepared(served: Served, body: ChatRequest) -> Dialogue:
    """Reads and tokenises a conversation. Raises Refusal."""
    wanted = body.max_completion_tokens or body.max_tokens
    return dialogue(
        served,
        [message.model_dump(exclude_none=True) for message in body.messages],
        body,
        offered(body.tools, body.tool_choice),
        constraint_of(body.response_format),
        wanted,
        (body.top_logprobs or 0) if body.logprobs else None,
    )


def dialogue(
    served: Served,
    messages: Sequence[Mapping[str, Any]],
    body: AnswerFields,
    functions: tuple[Sequence[Mapping[str, Any]], dict[str, Any] | None],
    constraint: dict[str, Any] | None,
    wanted: int | None,
    top_logprobs: int | None = None,
) -> Dialogue:
    """Returns the requests for the choices of a reply. functions: those offered, and the schema of a call that is
    forced; wanted: the most new tokens."""
    adapter = served.adapter(body.model)
    tools, forced = functions
    if forced is not None and constraint is not None:
        raise Refusal(400, "response_format and a forced function exclude each other", "invalid_format", "tool_choice")
    read = read_messages(messages)
    check_texts(served, read, tools)
    ids = tuple(prompt_ids(served, read, tools))
    room = served.room(len(ids), wanted, "max_completion_tokens")
    seed = body.seed_or_random()
    requests = [
        Request(
            ids=ids,
            max_new_tokens=room,
            sampling=body.sampling(served.model.sampling, seed, draw),
            stop_strings=body.stops,
            top_logprobs=top_logprobs,
            constraint=constraint if forced is None else forced,
            adapter=adapter,
            skip_special_tokens=not tools,  # marks of calls are special tokens in some vocabularies
        )
        for draw in range(body.choices)
    ]
    opened = served.model.tokenizer.decode(list(ids[-8:])).rstrip().endswith(THINK)
    thinking = opened and constraint is None and forced is None
    return Dialogue(ids, requests, served.form if tools else None, thinking, forced is not None)


class Choice:
    """One reply as it grows: what was thought, written and called."""

    def __init__(self, asked: Dialogue) -> None:
        self._reader = asked.reader()
        self.text, self.thought = "", ""
        self.calls: list[dict[str, Any]] = []

    def add(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """Returns the deltas of a stream that this text makes up."""
        parts = [*self._reader.feed(text), *(self._reader.end() if is_last else [])]
        return [self._delta(part) for part in parts]

    def _delta(self, part: Part) -> dict[str, Any]:
        if part.call is not None:
            function = {"name": part.call.name, "arguments": part.call.arguments}
            call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
            self.calls.append(call)
            return {"tool_calls": [{"index": len(self.calls) - 1, **call}]}
        self.text += part.text
        self.thought += part.thought
        return {"content": part.text} if part.text else {"reasoning_content": part.thought}

    def message(self) -> dict[str, Any]:
        text = self.text if self.text or not self.calls else None
        found: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.thought:
            found["reasoning_content"] = self.thought
        if self.calls:
            found["tool_calls"] = self.calls
        return found

    def finish(self, reason: str) -> str:
        return "tool_calls" if self.calls and reason == "stop" else reason


def whole(served: Served, body: ChatRequest, asked: Dialogue, answers: Sequence[Answer]) -> dict[str, Any]:
    """Returns the body of the response."""
    texts = TokenTexts(served.model.tokenizer)
    choices = []
    for index, answer in enumerate(answers):
        choice = Choice(asked)
        choice.add(answer.text, is_last=True)
        logprobs = chat_logprobs(answer.logprobs, texts) if body.logprobs else None
        finish = choice.finish(answer.finish_reason)
        choices.append({"index": index, "message": choice.message(), "logprobs": logprobs, "finish_reason": finish})
    count = sum(len(answer.tokens) for answer in answers)
    head = _head(served, body, "chat.completion")
    return {**head, "choices": choices, "usage": usage(len(asked.prompt), count)}


async def streamed(served: Served, body: ChatRequest, asked: Dialogue, group: Group) -> AsyncGenerator[bytes, None]:
    """Yields the events of the response."""
    head = _head(served, body, "chat.completion.chunk")
    texts = TokenTexts(served.model.tokenizer)
    more = {"usage": None} if body.wants_usage else {}

    def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event(json.dumps({**head, "choices": [choice], **more}))

    def chunks(index: int, piece: Piece) -> list[bytes]:
        choice = choices[index]
        deltas = choice.add(piece.text, piece.finish_reason is not None)
        found = chat_logprobs(piece.logprobs, texts) if body.logprobs and piece.logprobs else None
        if found is not None and not deltas:
            deltas = [{"content": ""}]
        made = [chunk(index, delta, found if place == 0 else None) for place, delta in enumerate(deltas)]
        if piece.finish_reason is not None:
            made.append(chunk(index, {}, None, choice.finish(piece.finish_reason)))
        return made

    choices = [Choice(asked) for _ in group.answers]
    for index in range(len(choices)):
        yield chunk(index, {"role": "assistant", "content": ""})
    count = 0
    async with aclosing(group.pieces()) as pieces:
        async for index, piece in pieces:
            count += len(piece.tokens)
            for made in chunks(index, piece):
                yield made
    if body.wants_usage:
        yield event(json.dumps({**head, "choices": [], "usage": usage(len(asked.prompt), count)}))
    yield event("[DONE]")


def usage(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _head(served: Served, body: AnswerFields, kind: str) -> dict[str, Any]:
    number = f"chatcmpl-{secrets.token_hex(12)}"
    return {"id": number, "object": kind, "created": int(time.time()), "model": body.model or served.name}
