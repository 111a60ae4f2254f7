"""The text of tokens as they come: whole characters, and nothing of what a stop string may still become."""

from __future__ import annotations

from collections.abc import Callable, Sequence

HALF = "\ufffd"  # a decoder's character for bytes that are none
MOST_HALVES = 3  # bytes of a character that wait for its last


class TextStream:
    """Decodes an answer token by token.

    The pieces joined are the decoded answer, up to the first stop string. Tokens are decoded together with those of the
    piece before them, since some tokenizers drop a leading space.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop_strings: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, [each for each in stop_strings if each]
        self._tokens: list[int] = []
        self._begin = self._read = 0  # the tokens of the piece before, and those that have no text yet
        self._given = 0  # characters of the tokens from _begin on that were given out
        self._held = ""  # text that may begin a stop string
        self.stopped = False  # a stop string came

    def push(self, token: int) -> str:
        """Returns the text that is complete with this token."""
        self._tokens.append(token)
        text = self._decode(self._tokens[self._begin :])
        waiting = min(MOST_HALVES, len(text) - len(text.rstrip(HALF)))
        whole = text[: len(text) - waiting]
        new, self._given = whole[self._given :], max(self._given, len(whole))
        if not waiting:
            self._begin, self._read = self._read, len(self._tokens)
            self._given = len(self._decode(self._tokens[self._begin : self._read]))
        return self._before_stops(new)

    def flush(self) -> str:
        """Returns the rest, when no more tokens come: of an incomplete character U+FFFD."""
        rest = self._held + self._decode(self._tokens[self._begin :])[self._given :]
        self._held, self._given = "", self._given + len(rest)
        return "" if self.stopped else rest

    def _before_stops(self, new: str) -> str:
        text = self._held + new
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of the text with which the stop string begins."""
    most = min(len(text), len(stop) - 1)
    return next((length for length in range(most, 0, -1) if text.endswith(stop[:length])), 0)
