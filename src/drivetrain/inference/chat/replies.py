"""Replies of one model or of two at once, as they come from the threads that generate."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drivetrain.generation.requests import FinishReason, Generator, Piece, Request

POLL_SECONDS = 0.2  # in which Ctrl-C is heard


@dataclass(frozen=True)
class Step:
    """A part of the reply of the model at this place. finish: why it ended, with its last part."""

    place: int
    text: str
    tokens: int
    finish: FinishReason | None = None
    error: Exception | None = None


class Replies:
    """The replies to one request of each generator."""

    def __init__(self, asked: Sequence[tuple[Generator, Request]]) -> None:
        """Raises UserError where a generator refuses its request."""
        self._pieces: queue.SimpleQueue[tuple[int, Piece]] = queue.SimpleQueue()
        self._running: dict[int, tuple[Generator, int]] = {}
        try:
            for place, (generator, request) in enumerate(asked):
                self._begin(place, generator, request)
        except BaseException:
            self.cancel()
            raise

    def _begin(self, place: int, generator: Generator, request: Request) -> None:
        number = generator.submit(request, lambda piece: self._pieces.put((place, piece)))
        self._running[place] = generator, number

    def steps(self) -> Iterator[Step]:
        """Yields the parts of all replies until each has ended."""
        while self._running:
            try:
                place, piece = self._pieces.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if piece.finish_reason is not None:
                self._running.pop(place, None)
            yield Step(place, piece.text, len(piece.tokens), piece.finish_reason, piece.error)

    def cancel(self) -> None:
        """Ends the replies that are running where they are."""
        for generator, number in self._running.values():
            generator.cancel(number)
        self._running.clear()
