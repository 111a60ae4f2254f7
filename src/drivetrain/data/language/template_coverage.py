"""Finds parts of a conversation that a chat template silently leaves out: tools, or a system's message.

It puts marks in the place of contents and names, once for each shape of conversation (its roles, and which messages
have calls or reasoning), because templates decide by these. A search for the contents themselves would fail with words
that stand twice, and with templates that trim or escape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from drivetrain.data.language.conversations import Message

Tools = Sequence[Mapping[str, Any]]
Render = Callable[[Sequence[Message], Tools], str]


class LeftOut:
    """Searches a template's renderings. render: messages and tools → the text of the whole conversation."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: dict[Any, str | None] = {}

    def first(self, messages: Sequence[Message], tools: Tools) -> str | None:
        """Returns a description of the first part left out; None if all is there. Only the last reply's reasoning is
        searched: some templates leave out that of earlier ones, as they do at inference."""
        shape = (tuple(map(_shape, messages)), len(tools))
        if shape not in self._known:
            self._known[shape] = self._found(messages, tools)
        return self._known[shape]

    def _found(self, messages: Sequence[Message], tools: Tools) -> str | None:
        marked = [_marked(place, message) for place, message in enumerate(messages)]
        offered = [_named(tool, _mark("function", number)) for number, tool in enumerate(tools)]
        try:
            text = self._render(marked, offered)
        except Exception:  # templates raise what they like; of the conversation itself they are asked as well
            return None
        wanted = [("a function that can be called", tool["function"]["name"]) for tool in offered]
        for place, message in enumerate(marked):
            wanted += _wanted(message, is_last=place == len(marked) - 1)
        text = text.lower()  # as the marks are: a template may write a system's message in capitals
        return next((what for what, mark in wanted if mark not in text), None)


def _shape(message: Message) -> tuple[str, bool, int, bool]:
    return message.role, bool(message.content.strip()), len(message.tool_calls), bool(message.reasoning_content)


def _wanted(marked: Message, is_last: bool) -> Iterator[tuple[str, str]]:
    """Yields descriptions of a marked message's parts, and their marks."""
    if marked.role != "assistant":
        yield f"the {marked.role}'s message", marked.content.strip()
        return
    for call in marked.tool_calls:
        yield "a call of a function", call["function"]["name"]
        yield from (("arguments of a call", name) for name in call["function"]["arguments"])
    if marked.tool_calls:
        yield "the text beside a call", marked.content.strip()
    if is_last and marked.reasoning_content:
        yield "reasoning_content", marked.reasoning_content


def _mark(what: str, *numbers: int) -> str:
    return "".join([what, *(f"{number}mark" for number in numbers)])


def _marked(place: int, message: Message) -> Message:
    """Marks a message. A reply without calls keeps its content, which templates take apart."""
    own = message.role != "assistant" or message.tool_calls
    calls = tuple(
        _named(call, _mark("call", place, number), {_mark("argument", place, number): "value"})
        for number, call in enumerate(message.tool_calls)
    )
    return replace(
        message,
        content=_mark("content", place) if own and message.content.strip() else message.content,
        tool_calls=calls,
        reasoning_content=_mark("reasoning", place) if message.reasoning_content else message.reasoning_content,
    )


def _named(function: Mapping[str, Any], name: str, arguments: dict[str, str] | None = None) -> dict[str, Any]:
    called = {} if arguments is None else {"arguments": arguments}
    return {**function, "function": {**function["function"], "name": name, **called}}
