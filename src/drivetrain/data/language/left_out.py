"""What a chat template leaves out without a word: tools, or a system's message, of which it knows nothing.

Found with marks in the place of contents and names, once for each shape of conversation (its roles, and who has calls
or reasoning), because templates decide by these. Looking for the contents themselves would be fooled by words that
stand twice, and by templates that trim or escape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from drivetrain.data.language.conversations import Message

Tools = Sequence[Mapping[str, Any]]
Render = Callable[[Sequence[Message], Tools], str]


class LeftOut:
    """Asks a template. render: messages and tools → the text of the whole conversation."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: dict[Any, list[tuple[int, str]]] = {}

    def first(self, messages: Sequence[Message], tools: Tools, wanted: Sequence[int]) -> str | None:
        """The first thing left out, in words; None if all is there. wanted: the messages that are looked for."""
        shape = (tuple(map(_shape, messages)), bool(tools))
        if shape not in self._known:
            self._known[shape] = self._found(messages, tools)
        return next((what for place, what in self._known[shape] if place < 0 or place in wanted), None)

    def _found(self, messages: Sequence[Message], tools: Tools) -> list[tuple[int, str]]:
        marked = [_marked(place, message) for place, message in enumerate(messages)]
        named = [_named(tool, _mark(0, "function")) for tool in tools]
        try:
            text = self._render(marked, named)
        except Exception:  # templates raise what they like; of the conversation itself they are asked as well
            return []
        found = [(-1, "the functions that can be called")] if tools and _mark(0, "function") not in text else []
        for place, message in enumerate(messages):
            if message.role != "assistant":
                if message.content.strip() and _mark(place, "content") not in text:
                    found.append((place, f"the {message.role}'s message"))
                continue
            if message.tool_calls and _mark(place, "call") not in text:
                found.append((place, "calls of functions"))
            if message.tool_calls and message.content.strip() and _mark(place, "said") not in text:
                found.append((place, "what is said beside a call"))
            last = place == len(messages) - 1  # of earlier replies some templates leave it out, as at inference
            if last and message.reasoning_content and _mark(place, "reasoning") not in text:
                found.append((place, "reasoning_content"))
        return found


def _shape(message: Message) -> tuple[str, bool, bool, bool]:
    content, reasoning = bool(message.content.strip()), bool(message.reasoning_content)
    return message.role, content, bool(message.tool_calls), reasoning


def _mark(place: int, what: str) -> str:
    return f"{what}{place}mark"


def _marked(place: int, message: Message) -> Message:
    """A reply without calls keeps its content, which templates take apart."""
    if message.role != "assistant":
        return replace(message, content=_mark(place, "content") if message.content.strip() else message.content)
    beside = message.tool_calls and message.content.strip()
    calls = tuple(_named(call, _mark(place, "call")) for call in message.tool_calls)
    reasoning = _mark(place, "reasoning") if message.reasoning_content else message.reasoning_content
    content = _mark(place, "said") if beside else message.content
    return replace(message, content=content, tool_calls=calls, reasoning_content=reasoning)


def _named(function: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**function, "function": {**function["function"], "name": name}}
