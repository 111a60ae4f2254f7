"""Renders conversations by the template's output for others of the same shape.

A chat template is a program: it decides by roles, by the fields of a message, and some look into contents. To find its
use of contents it is run once for each shape (the roles of the messages) with marks in their place. A mark is a text
that refuses inspection: it cannot be searched, compared, counted, or changed other than by cutting white space off its
ends. If the template runs through and wrote each mark whole, it only writes contents out, and any others can be put in
the marks' place, which is ten times as quick. Everything else is rendered by the template itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from drivetrain.data.language.conversations import Message

# What the text of a mark holds, filters such as tojson, escape and upper write otherwise.
BEFORE, AFTER = "\u2003\t\u205f", "\u205f\t\u2003"
CORE = re.compile("\"a\\\\<&'\ue000(\\d+)\ue001z")
# These join texts without asking them, so that what a mark was joined to could be looked into; or change by the hour.
NOT_FOLLOWED = re.compile(r"""~|[|.]\s*(?:join|format)\b|['"]\s*%\s*[\w(]|strftime_now""")
COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
CHECKED = 3  # conversations of each shape that are rendered both ways

Pieces = list[tuple[str, int, bool, bool]]  # text before a content, its number, whether each end of it is trimmed
Shape = tuple[tuple[str, ...], bool]


class LookedIntoError(Exception):
    """A template looked into a content."""


class Mark(str):
    """A content that can be written out, joined and trimmed, and nothing else."""

    __slots__ = ()

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True  # blank contents are rendered by the template

    def __add__(self, other: Any) -> Mark:
        return Mark(str.__add__(self, other))

    def __radd__(self, other: Any) -> Mark:
        return Mark(str.__add__(other, self))

    def strip(self, chars: Any = None) -> Mark:
        return Mark(_plain(chars, str.strip, self))

    def lstrip(self, chars: Any = None) -> Mark:
        return Mark(_plain(chars, str.lstrip, self))

    def rstrip(self, chars: Any = None) -> Mark:
        return Mark(_plain(chars, str.rstrip, self))


def _plain(chars: Any, cut: Callable[[str], str], text: str) -> str:
    if chars is not None:
        raise LookedIntoError
    return cut(text)


def _refused(*_: Any, **__: Any) -> Any:
    raise LookedIntoError


for _name in dir(str):
    _kept = ("__new__", "__init__", "__class__", "__getattribute__", "__doc__", "__setattr__", "__delattr__")
    if _name not in Mark.__dict__ and _name not in _kept and callable(getattr(str, _name)):
        setattr(Mark, _name, _refused)


class ShapeRenderings:
    """render: messages as `Message.as_template` has them, and whether a generation prompt follows → text, for
    conversations without tools. template: the compiled Jinja template behind it, and what else it is passed."""

    def __init__(
        self, render: Callable[[Sequence[Message], bool], str], template: Any, variables: dict[str, Any], source: str
    ) -> None:
        self._render, self._template, self._variables = render, template, variables
        self._followed = NOT_FOLLOWED.search(COMMENT.sub("", source)) is None
        self._known: dict[Shape, Pieces | None] = {}
        self._checked: dict[Shape, int] = {}

    def text(self, messages: Sequence[Message], prompt: bool) -> str:
        """Returns the rendering of these messages, by either way."""
        if not self._followed or not all(map(_has_content_alone, messages)):
            return self._render(messages, prompt)
        shape = (tuple(message.role for message in messages), prompt)
        if shape not in self._known:
            self._known[shape] = self._found(shape)
        pieces = self._known[shape]
        if pieces is None:
            return self._render(messages, prompt)
        made = _put_together(pieces, messages)
        if self._checked.get(shape, 0) < CHECKED:
            self._checked[shape] = self._checked.get(shape, 0) + 1
            rendered = self._render(messages, prompt)
            if made != rendered:
                self._known[shape] = None
            return rendered
        return made

    def _found(self, shape: Shape) -> Pieces | None:
        """Returns the text around contents in that shape; None if the template does more than write them out."""
        roles, prompt = shape
        marks = [Mark(f"{BEFORE}\"a\\<&'\ue000{number}\ue001z{AFTER}") for number in range(len(roles))]
        given = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        environment = self._template.environment
        environment.concat = _joined  # macros join what they write; joined to others, a mark stays one
        try:
            text = self._template.render(
                messages=given, tools=None, documents=None, add_generation_prompt=prompt, **self._variables
            )
        except Exception:  # LookedIntoError, and whatever a template raises, which it does for the conversation too
            return None
        finally:
            del environment.concat  # the class's own is behind it
        return _pieces(str.__str__(text))


def _has_content_alone(message: Message) -> bool:
    has_more = message.tool_calls or message.reasoning_content or message.name or message.tool_call_id
    return not has_more and not message.content.isspace() and message.content != ""


def _joined(parts: Iterable[str]) -> str:
    held = list(parts)
    text = "".join(held)
    return Mark(text) if any(type(part) is Mark for part in held) else text


def _pieces(text: str) -> Pieces | None:
    """Splits a rendering at its marks. The last piece has the number -1 and the text behind the last content. None if
    white space was cut in part."""
    pieces: Pieces = []
    start = 0
    for found in CORE.finditer(text):
        before, end = text[start : found.start()], found.end()
        whole = before.endswith(BEFORE), text.startswith(AFTER, end)
        before = before.removesuffix(BEFORE)
        start = end + len(AFTER) * whole[1]
        pieces.append((before, int(found[1]), not whole[0], not whole[1]))
    pieces.append((text[start:], -1, False, False))
    special = set(BEFORE + AFTER) - {"\t"} | {"\ue000", "\ue001"}
    return None if any(special & set(before) for before, *_ in pieces) else pieces


def _put_together(pieces: Pieces, messages: Sequence[Message]) -> str:
    parts = []
    for before, number, trims_start, trims_end in pieces:
        parts.append(before)
        if number >= 0:
            content = messages[number].content
            content = content.lstrip() if trims_start else content
            parts.append(content.rstrip() if trims_end else content)
    return "".join(parts)
