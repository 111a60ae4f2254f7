"""The model that a server serves, and what bounds its answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from drivetrain.errors import UserError
from drivetrain.generation.replies import Form, form_of
from drivetrain.generation.requests import Request
from drivetrain.inference.serve.answering import Group, late
from drivetrain.inference.serve.metrics import Metrics
from drivetrain.web.limits import Places
from drivetrain.web.refusals import Refusal

if TYPE_CHECKING:
    from drivetrain.inference.loading import LoadedModel

T = TypeVar("T")
MOST_NEW = 1 << 16  # tokens of an answer, where the model's context has no bound


def check_name(model: str | None, names: Sequence[str]) -> None:
    """Raises Refusal (404) for a model's name that is none of these. None: the request names no model."""
    if model is not None and model not in names:
        why = f"there is no model {model!r} here; there is {', '.join(names)}"
        raise Refusal(404, why, "model_not_found", "model")


@dataclass
class Served:
    """A language model. seconds: that the answers to one request may take."""

    model: LoadedModel
    places: Places
    metrics: Metrics
    seconds: float = 600.0
    created: int = field(default_factory=lambda: int(time.time()))
    # one thread: fast tokenizers are not made for several texts at once
    _texts: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "texts"))
    # others: a complete answer, whose tokens are only looked up, waits neither for long prompts nor for long answers
    _answers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, "answers"))

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def names(self) -> list[str]:
        """The model's name, and those of its adapters."""
        return [self.name, *self.model.adapters]

    def adapter(self, model: str | None) -> str | None:
        """Returns the adapter that a request's `model` names. Raises Refusal (404) for another model's name."""
        check_name(model, self.names)
        return None if model == self.name else model

    @cached_property
    def form(self) -> Form | None:
        """How the model writes calls of functions."""
        return None if self.model.template is None else form_of(self.model.template.text)

    async def finished(self, work: Callable[[], T]) -> T:
        """Returns the result of work on complete answers, done beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._answers, work)

    async def begun(self, prepare: Callable[[], T], requests_of: Callable[[T], Sequence[Request]]) -> tuple[T, Group]:
        """Prepares a request of the API and begins its answers, beside the event loop: a long prompt, and a form that
        is compiled, stop no other answer. Returns what `prepare` returned, and the answers, which end in time.

        Raises Refusal: what `prepare` raises, 400 for what the model cannot do, 504 where the time is over. Where it is
        cancelled, no answer is left in the making.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self.seconds

        def work() -> tuple[T, Group]:
            asked = prepare()
            return asked, Group(self.model.generator, requests_of(asked), self.metrics, loop)

        working = self._texts.submit(work)
        try:
            async with asyncio.timeout_at(end):
                asked, group = await asyncio.wrap_future(working)
        except UserError as error:
            first = error.problems[0]
            raise Refusal(400, f"{first.field}: {first.why}; {first.fix}", "invalid_request", first.field) from None
        except TimeoutError:
            working.add_done_callback(_close)
            raise late(self.seconds) from None
        except asyncio.CancelledError:
            working.add_done_callback(_close)
            raise
        group.end_after(end - loop.time(), self.seconds)
        return asked, group

    @cached_property
    def _most_characters(self) -> int | None:
        """Returns a number of characters beyond which no text fits into the context: so many of the longest token."""
        longest = self.model.context_length
        return None if longest is None else longest * max(map(len, self.model.tokenizer.get_vocab()))

    def check_length(self, texts: Iterable[str], field_name: str) -> None:
        """Raises Refusal (400) for texts that are too long for the context whatever their tokens are: these would take
        their time to be found."""
        count, most = sum(map(len, texts)), self._most_characters
        if most is not None and count > most:
            longest = f"the model's context has {self.model.context_length:,} tokens, of at most {most:,} characters"
            raise Refusal(400, f"{longest}; the prompt has {count:,}", "context_length_exceeded", field_name)

    def room(self, prompt: int, wanted: int | None, field_name: str) -> int:
        """Returns the most new tokens of an answer. Raises Refusal (400) where the context has no room for them.

        prompt: its number of tokens; wanted: None for all that there is room for.
        """
        longest = self.model.context_length
        if longest is None:
            return MOST_NEW if wanted is None else min(wanted, MOST_NEW)
        if prompt + (1 if wanted is None else wanted) > longest:
            more = "" if wanted is None else f" and {field_name} is {wanted:,}"
            why = f"the model's context has {longest:,} tokens; the prompt has {prompt:,}{more}"
            raise Refusal(400, why, "context_length_exceeded", "messages" if field_name != "max_tokens" else "prompt")
        return longest - prompt if wanted is None else wanted

    def close(self) -> None:
        for each in (self._texts, self._answers):
            each.shutdown(cancel_futures=True)
        self.model.close()


def _close(working: Future[tuple[Any, Group]]) -> None:
    """Ends answers that began when their request was over already."""
    if not working.cancelled() and working.exception() is None:
        working.result()[1].close()
