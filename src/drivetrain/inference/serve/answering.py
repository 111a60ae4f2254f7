"""From the thread that generates to the event loop that serves: pieces of an answer as they come, and whole answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

from drivetrain.generation.local import joined
from drivetrain.generation.requests import Answer, FormError, Generator, Piece, Request
from drivetrain.inference.serve.metrics import Metrics
from drivetrain.web.refusals import Refusal


class Answering:
    """One answer in the making. It begins at once; what is not read to its end has to be closed."""

    def __init__(
        self, generator: Generator, request: Request, metrics: Metrics, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Raises UserError for a request that the generator refuses. loop: in which the pieces are read."""
        self._generator, self._metrics = generator, metrics
        self._pieces: asyncio.Queue[Piece | Refusal] = asyncio.Queue()

        def receive(piece: Piece) -> None:
            with suppress(RuntimeError):  # the loop ended, with the server
                loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

        self._number: int | None = None
        if request.max_new_tokens or request.prompt_logprobs:
            self._number = generator.submit(request, receive)
        else:  # the prompt alone is wanted back, which the model need not read
            receive(Piece("", (), finish_reason="length"))
        self._start, self._over = time.perf_counter(), False

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yields the pieces. Raises Refusal where the model failed, or the time is over."""
        first = True
        try:
            while not self._over:
                piece = await self._pieces.get()
                if isinstance(piece, Refusal):
                    raise piece
                self._over = piece.finish_reason is not None
                if isinstance(piece.error, FormError):
                    raise Refusal(400, f"{piece.error}; simplify it", "form_failed", "response_format") from piece.error
                if piece.finish_reason == "error":
                    raise Refusal(500, f"the model failed: {piece.error}", "model_failed") from piece.error
                if piece.finish_reason == "cancelled":
                    raise Refusal(503, "the server is stopping", "stopping")
                if first:
                    self._metrics.first_piece.observe(time.perf_counter() - self._start)
                    first = False
                self._metrics.new_tokens.inc(len(piece.tokens))
                yield piece
        finally:
            self.close()

    def fail(self, refusal: Refusal) -> None:
        """Ends the answer with an error, unless it is over."""
        self._pieces.put_nowait(refusal)

    async def whole(self) -> Answer:
        """Returns the complete answer."""
        async with aclosing(self.pieces()) as pieces:
            found = [piece async for piece in pieces]
        return joined(found)

    def close(self) -> None:
        """Ends the answer where it is; later calls do nothing."""
        if not self._over:
            self._over = True
            if self._number is not None:
                self._generator.cancel(self._number)


class Group:
    """The answers to one request of the API: n choices, or several prompts."""

    def __init__(
        self,
        generator: Generator,
        requests: Sequence[Request],
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Begins all, or none, on any thread: raises UserError where one is refused. loop: in which they are read."""
        self.answers: list[Answering] = []
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        try:
            for request in requests:
                self.answers.append(Answering(generator, request, metrics, loop))
        except BaseException:
            self._end()
            raise

    def end_after(self, seconds: float, limit: float) -> None:
        """Ends the answers that are not complete by then. limit: the seconds of the whole request. Called in the
        loop."""
        self._timer = self._loop.call_later(seconds, self._late, limit)

    async def whole(self) -> list[Answer]:
        try:
            return list(await asyncio.gather(*(each.whole() for each in self.answers)))
        finally:
            self.close()

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yields the pieces of all answers as they come, each with its answer's place."""
        queue: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue()
        tasks = [asyncio.ensure_future(_forward(place, each, queue)) for place, each in enumerate(self.answers)]
        going = len(tasks)
        try:
            while going:
                place, piece = await queue.get()
                if isinstance(piece, BaseException):
                    raise piece
                if piece is None:
                    going -= 1
                else:
                    yield place, piece
        finally:
            for task in tasks:
                task.cancel()
            self.close()

    def close(self) -> None:
        """Ends the answers where they are; later calls do nothing."""
        if self._timer is not None:
            self._timer.cancel()
        self._end()

    def _end(self) -> None:
        for each in self.answers:
            each.close()

    def _late(self, seconds: float) -> None:
        for each in self.answers:
            each.fail(late(seconds))


def late(seconds: float) -> Refusal:
    return Refusal(504, f"the answer was not complete after {seconds:g} s", "timeout")


async def _forward(
    place: int, answering: Answering, queue: asyncio.Queue[tuple[int, Piece | BaseException | None]]
) -> None:
    try:
        async with aclosing(answering.pieces()) as pieces:
            async for piece in pieces:
                queue.put_nowait((place, piece))
        queue.put_nowait((place, None))
    except Refusal as refusal:
        queue.put_nowait((place, refusal))
