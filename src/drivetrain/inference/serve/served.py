"""The model that a server serves, and what bounds its answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from drivetrain.errors import UserError
from drivetrain.generation.replies import Form, form_of
from drivetrain.generation.requests import Request
from drivetrain.inference.serve.answering import Group
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
    # one thread: fast tokenizers are not made for several at once
    _texts: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "texts"))

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

    async def prepared(self, work: Callable[[], T]) -> T:
        """Returns the result of work on texts, done beside the event loop: a long prompt stops no other answer."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, work)

    async def begun(self, requests: Sequence[Request]) -> Group:
        """Begins answers, beside the event loop: a form is compiled first. Raises Refusal (400) for what the model
        cannot do."""
        loop = asyncio.get_running_loop()
        try:
            group = await self.prepared(lambda: Group(self.model.generator, requests, self.metrics, loop))
            group.end_after(self.seconds)
            return group
        except UserError as error:
            first = error.problems[0]
            raise Refusal(400, f"{first.field}: {first.why}; {first.fix}", "invalid_request", first.field) from None

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
        self._texts.shutdown(cancel_futures=True)
        self.model.close()
