"""Reads an assistant's reply, piece by piece: what it thought, what it says, and the functions that it calls.

Three forms are known, by the marks that the model's chat template writes itself: <tool_call>{...}</tool_call> (Hermes,
Qwen, chatml), [TOOL_CALLS][{...}, ...] (Mistral), and a reply that is nothing but JSON with a name and arguments or
parameters (Llama 3.1, also behind <|python_tag|>). Thoughts stand between <think> and </think>. What does not hold to
its form is kept as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"
CALLS = "[TOOL_CALLS]"
PYTHON = "<|python_tag|>"

Form = Literal["tags", "list", "bare"]


@dataclass(frozen=True)
class Call:
    """A call of a function. arguments: JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Part:
    """A part of a reply: one of the three."""

    text: str = ""
    thought: str = ""
    call: Call | None = None


def form_of(template: str) -> Form | None:
    """Returns how a chat template (its Jinja source) writes calls; None if it knows no tools."""
    if CALL in template:
        return "tags"
    if CALLS in template:
        return "list"
    return "bare" if PYTHON in template or "tools" in template else None


class ReplyReader:
    """Reads one reply. form: of its calls, None where no function is offered; thinking: whether the prompt ends within
    a thought."""

    def __init__(self, form: Form | None, thinking: bool = False) -> None:
        self._form = form
        self._state: Literal["start", "thought", "text", "call"] = "thought" if thinking else "start"
        self._rest = ""
        self._after_mark = thinking  # where line ends belong to the form, and not to the text
        self._calls = ""  # the mark of a form whose calls end with the reply
        self._steps = {
            "start": self._in_start,
            "thought": self._in_thought,
            "text": self._in_text,
            "call": self._in_call,
        }

    def feed(self, text: str) -> list[Part]:
        """Returns the parts that are complete, or certain to be text, once this follows."""
        self._rest += text
        return list(self._read())

    def end(self) -> list[Part]:
        """Returns what is left when the reply ends."""
        rest, self._rest = self._rest, ""
        if self._state == "thought":
            return [Part(thought=rest)] if rest else []
        if self._state == "call" and self._form == "tags":
            return [*_parts(rest, CALL + rest)]  # cut short, or without its end mark
        if self._state == "call":
            return [*_parts(rest, self._calls + rest)]
        return [Part(text=rest)] if rest else []

    def _read(self) -> Iterator[Part]:
        going = True
        while going:
            before = self._state
            if self._after_mark:
                self._rest = self._rest.lstrip("\n")
                self._after_mark = not self._rest
            yield from self._steps[before]()
            going = self._state != before

    def _in_start(self) -> Iterator[Part]:
        """Waits until it is clear how the reply begins."""
        begun = self._rest.lstrip()
        if not begun:
            return
        if begun.startswith(THINK):
            self._rest, self._state, self._after_mark = begun[len(THINK) :], "thought", True
        elif self._form == "bare" and begun.startswith(("{", PYTHON)):
            self._calls = self._rest[: -len(begun)] + (PYTHON if begun.startswith(PYTHON) else "")
            self._rest, self._state = begun.removeprefix(PYTHON), "call"
        elif not any(mark.startswith(begun) for mark in (THINK, PYTHON)):
            self._state = "text"
        yield from ()

    def _in_thought(self) -> Iterator[Part]:
        before, mark, after = self._rest.partition(THOUGHT)
        if mark:
            self._rest, self._state, self._after_mark = after, "start", True
            before = before.rstrip("\n")
        else:
            before, self._rest = _certain(before, (THOUGHT,))
        if before:
            yield Part(thought=before)

    def _in_text(self) -> Iterator[Part]:
        mark = {"tags": CALL, "list": CALLS}.get(self._form or "")
        if mark is None:
            before, self._rest = self._rest, ""
        elif mark in self._rest:
            before, _, self._rest = self._rest.partition(mark)
            before, self._state = before.rstrip("\n"), "call"
            self._calls = mark
        else:
            before, self._rest = _certain(self._rest, (mark,))
        if before:
            yield Part(text=before)

    def _in_call(self) -> Iterator[Part]:
        if self._form != "tags":
            return
        body, mark, after = self._rest.partition(CALLED)
        if mark:
            self._rest, self._state, self._after_mark = after, "text", True
            yield from _parts(body, CALL + body + CALLED)


def whole(text: str, form: Form | None, thinking: bool = False) -> list[Part]:
    """Returns the parts of a complete reply."""
    reader = ReplyReader(form, thinking)
    return [*reader.feed(text), *reader.end()]


def _certain(text: str, marks: tuple[str, ...]) -> tuple[str, str]:
    """Splits off an end that may be the beginning of a mark, with the line ends before it."""
    for length in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            head = text[:-length].rstrip("\n")
            return head, text[len(head) :]
    head = text.rstrip("\n")
    return head, text[len(head) :]


def _parts(body: str, text: str) -> Iterator[Part]:
    """Yields the calls in a JSON text, or a part with `text` if it holds none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    calls = [_call(each) for each in (found if isinstance(found, list) else [found])]
    if not calls or None in calls:
        yield Part(text=text)
    else:
        yield from (Part(call=call) for call in calls)


def _call(given: Any) -> Call | None:
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return None
    arguments = given.get("arguments", given.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(given["name"], arguments)
    return Call(given["name"], json.dumps(arguments, ensure_ascii=False))
