"""A model in this process that answers requests on a thread of its own, many at once."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence

import torch

from drivetrain.errors import Problem, UserError, problem
from drivetrain.generation.constraints import Constraints
from drivetrain.generation.requests import Answer, Piece, Receiver, Request, Sampling, joined
from drivetrain.generation.running_batch import RunningBatch
from drivetrain.generation.sequence import Running, Vocabulary
from drivetrain.runtime.openmp import end_helpers

LOG = logging.getLogger(__name__)
# makes the batch in which the requests of one adapter run
MakeBatch = Callable[[str | None], RunningBatch]


class LocalGenerator:
    """Implements `requests.Generator`.

    make_batch: called once for each adapter that is asked for. adapters: the names of those that there are. places: the
    longest sequence that the model has positions for, if there is a bound. ends: tokens that end each answer.
    """

    def __init__(
        self,
        make_batch: MakeBatch,
        vocabulary: Vocabulary,
        ends: frozenset[int],
        places: int | None,
        size: int,
        constraints: Constraints,
        adapters: Sequence[str] = (),
    ) -> None:
        """size: ids that the model has an embedding for."""
        self._make_batch, self._vocabulary, self._ends, self._places = make_batch, vocabulary, ends, places
        self._size, self._adapters, self._constraints = size, frozenset(adapters), constraints
        self._numbers = itertools.count()
        self._batches: dict[str | None, RunningBatch] = {}  # only the thread touches them
        self._changed = threading.Condition()
        self._arrived: list[Running] = []
        self._cancelled: set[int] = set()
        self._closed = False
        end_helpers()  # of the thread that loaded the model
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, receive: Receiver) -> int:
        """Queues a request and returns its number; `receive` gets its pieces. Raises UserError for one that cannot be
        answered."""
        most = self._room(request)
        number = next(self._numbers)

        def decode(ids: Sequence[int]) -> str:
            return self._vocabulary.decode(ids, skip_special_tokens=request.skip_special_tokens)

        form = request.constraint
        constraint = None if form is None else self._constraints.started(form)
        running = Running(number, request, receive, decode, self._ends, most, constraint)
        with self._changed:
            if self._closed:
                raise problem("request", "the model is closed", "load it again")
            self._arrived.append(running)
            self._changed.notify()
        return number

    def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """Returns the answers in the order of the requests. Raises UserError for one that cannot be answered."""
        for request in requests:
            self._room(request)
        order = sorted(range(len(requests)), key=lambda place: (len(requests[place].ids), requests[place].ids))
        waiting = {place: _Collected() for place in order}
        numbers: list[int] = []
        try:
            for place in order:
                numbers.append(self.submit(requests[place], waiting[place]))
            end_helpers()  # of this thread, which waits now
            return [waiting[place].answer() for place in range(len(requests))]
        except BaseException:  # an answer that failed, or Ctrl-C: the others are not wanted any more
            for number in numbers:
                self.cancel(number)
            raise

    def cancel(self, number: int) -> None:
        """Ends a request, if it is not over; its receiver gets a last piece with "cancelled"."""
        with self._changed:
            self._cancelled.add(number)
            self._changed.notify()

    def close(self) -> None:
        """Ends all requests and gives memory back."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _room(self, request: Request) -> int:
        """Returns the number of new tokens that there is room for. Raises UserError if nothing can be answered."""
        count, places, wanted = len(request.ids), self._places, request.max_new_tokens
        if not count:
            raise problem("prompt", "it has no tokens", "give a prompt of at least one")
        if places is not None and count + min(wanted, 1) > places:
            why = f"it has {count:,} tokens, and the model's context of {places:,} leaves no room for an answer"
            raise problem("prompt", why, "shorten it")
        if unknown := [token for token in request.ids if not 0 <= token < self._size]:
            raise problem("prompt", f"{unknown[0]} is no token of the model's {self._size:,}", "give its own tokens")
        if wanted < (0 if request.prompt_logprobs else 1):
            raise problem("max_new_tokens", f"{wanted} was given", "give at least 1")
        _check_sampling(request.sampling)
        if request.adapter is not None and request.adapter not in self._adapters:
            known = ", ".join(sorted(self._adapters)) or "none"
            raise problem("adapter", f"{request.adapter} is not loaded", f"loaded: {known}")
        return wanted if places is None else places - count

    # --- the thread ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()  # operations keep no record for autograd: up to 5 % of a step of one row
    def _run(self) -> None:
        while self._take_arrived():
            for batch in self._batches.values():
                if batch.requests:
                    _step(batch)
        for batch in self._batches.values():
            for running in batch.requests:
                running.cancel()
        self._batches.clear()

    def _take_arrived(self) -> bool:
        """Takes what was submitted and cancelled meanwhile; waits if there is nothing to do. Returns whether it goes
        on."""
        with self._changed:
            while not (self._arrived or self._cancelled or self._closed or self._is_busy()):
                end_helpers()  # another model's thread may compute meanwhile
                self._changed.wait()
            arrived, cancelled = self._arrived, self._cancelled
            self._arrived, self._cancelled = [], set()
        for running in arrived:
            try:
                self._batch_of(running.request.adapter).add(running)
            except Exception as error:  # ends this request, and not the thread that all others wait for
                LOG.exception("a request could not begin")
                running.fail(error)
        if cancelled:
            for running in [each for batch in self._batches.values() for each in batch.requests]:
                if running.number in cancelled:
                    running.cancel()
        return not self._closed

    def _batch_of(self, adapter: str | None) -> RunningBatch:
        if adapter not in self._batches:
            self._batches[adapter] = self._make_batch(adapter)
        return self._batches[adapter]

    def _is_busy(self) -> bool:
        return any(batch.requests for batch in self._batches.values())


def _check_sampling(sampling: Sampling) -> None:
    bounds = (
        ("temperature", sampling.temperature, 0 <= sampling.temperature < float("inf"), "0 or more"),
        ("top_k", sampling.top_k, sampling.top_k is None or sampling.top_k >= 0, "1 or more; 0 for all"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0, at most 1"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "0 to 1"),
        ("repetition_penalty", sampling.repetition_penalty, 0 < sampling.repetition_penalty < float("inf"), "above 0"),
    )
    problems = [
        Problem("sampling", f"{name} {value} was given", f"give {fix}") for name, value, ok, fix in bounds if not ok
    ]
    if problems:
        raise UserError(problems)


def _step(batch: RunningBatch) -> None:
    """Continues a batch. An error of the model, such as no memory, ends its requests and not the generator."""
    try:
        batch.step()
    except Exception as error:
        LOG.exception("a batch of %d requests failed", len(batch.requests))
        failed = [running for running in batch.requests if not running.is_over]
        batch.clear()
        for running in failed:
            running.fail(error)


class _Collected:
    """Receives the pieces of one answer."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._over = threading.Event()

    def __call__(self, piece: Piece) -> None:
        self._pieces.append(piece)
        if piece.finish_reason is not None:
            self._over.set()

    def answer(self) -> Answer:
        self._over.wait()
        return joined(self._pieces)
