"""Yields the objects of one large JSON list without holding the file in memory.

The standard parser reads one value at a time out of a window of text, which is extended wherever a value may go on
behind its end. A parser of events (ijson) would need as little memory, and build each object in Python.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

WINDOW = 1 << 20  # characters
LONGEST_WORD = 16  # characters that the parser may see the beginning of: -Infinity, \ud83d\ude00
NOT_A_LIST = "holds no list of objects"

_SPACE = re.compile(r"[ \t\n\r]*")
_decode = json.JSONDecoder().raw_decode


class NotAListError(ValueError):
    """The JSON is complete, but no list of objects."""


class JsonText:
    """Reads a JSON text forward."""

    def __init__(self, opened: TextIO) -> None:
        self._opened = opened
        self._text, self._at, self._ended = "", 0, False
        self._line, self._column = 1, 1  # of the window's first character
        self.read = 0  # characters behind the last value

    def value(self) -> tuple[Any, str]:
        """Returns the next value and its text. Raises json.JSONDecodeError, with the place in the file, if there is
        none."""
        start = self._at
        while True:
            self._space()
            try:
                found, end = _decode(self._text, self._at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - LONGEST_WORD
                behind = error.pos - self._at  # going further moves the window
                if not cut or not self._further():
                    raise self.error(error.msg, self._at + behind) from None
                continue
            if end < len(self._text) or not self._further():  # else a number may go on
                source, self._at = self._text[self._at : end], end
                self.read += end - start
                return found, source

    def sign(self) -> str:
        """Returns the next character that is no white space, without taking it; empty at the end."""
        self._space()
        return self._text[self._at : self._at + 1]

    def take(self, *wanted: str, message: str) -> str:
        """Takes the next character, which has to be one of those wanted."""
        sign = self.sign()
        if not sign or sign not in wanted:
            raise self.error(message, self._at)
        self._at += 1
        return sign

    def error(self, message: str, place: int) -> json.JSONDecodeError:
        """Returns the error at a place of the window, with line and column of the file."""
        error = json.JSONDecodeError(message, self._text, place)
        if error.lineno == 1:
            error.colno += self._column - 1
        error.lineno += self._line - 1
        return error

    def at_place(self, message: str) -> json.JSONDecodeError:
        return self.error(message, self._at)

    def _space(self) -> None:
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text) or not self._further():
                return

    def _further(self) -> bool:
        """Reads as much again as is held, so that one long value is not read over and over; False at the end."""
        if self._ended:
            return False
        more = self._opened.read(max(WINDOW, len(self._text) - self._at))
        self._ended = not more
        gone = self._text[: self._at]
        if lines := gone.count("\n"):
            self._line, self._column = self._line + lines, len(gone) - gone.rindex("\n")
        else:
            self._column += len(gone)
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)


def objects(opened: TextIO) -> Iterator[tuple[Any, str, int]]:
    """Yields each element of the list, its text, and how many characters were read with it.

    The list is all of the text, or its only list, under the key "data". Raises json.JSONDecodeError if the text is
    broken, NotAListError if it is something else; by then elements may have been returned.
    """
    text = JsonText(opened)
    if text.sign() == "[":
        yield from _elements(text)
    elif text.sign() == "{":
        yield from _data(text)
    else:
        text.value()
        raise NotAListError(NOT_A_LIST)
    if text.sign():
        raise text.at_place("Extra data")


def _data(text: JsonText) -> Iterator[tuple[Any, str, int]]:
    lists: list[str] = []
    text.take("{", message="Expecting value")
    while text.sign() != "}":
        if text.sign() != '"':
            raise text.at_place("Expecting property name enclosed in double quotes")
        key, _ = text.value()
        text.take(":", message="Expecting ':' delimiter")
        if text.sign() == "[":
            lists.append(key)
            found = _elements(text)
            if lists == ["data"]:
                yield from found
            else:
                for _ in found:
                    pass
        else:
            text.value()
        if text.sign() == "}":
            break
        text.take(",", message="Expecting ',' delimiter")
    text.take("}", message="Expecting ',' delimiter")
    if lists != ["data"]:
        raise NotAListError(NOT_A_LIST)


def _elements(text: JsonText) -> Iterator[tuple[Any, str, int]]:
    text.take("[", message="Expecting value")
    if text.sign() == "]":
        text.take("]", message="Expecting value")
        return
    while True:
        before = text.read
        found, source = text.value()
        yield found, source, text.read - before
        if text.take(",", "]", message="Expecting ',' delimiter") == "]":
            return
