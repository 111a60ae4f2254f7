"""Passes of the model over samples that each rank has of its own: log-probabilities of them, and answers to prompts.

An engine's forward pass may communicate with the other ranks, so all of them run equally many: a rank that has fewer
batches, or whose answers are complete, repeats one whose results it drops. All ranks call each method together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from drivetrain.config.generation import Generation
from drivetrain.data.loader import MicroBatch
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.generation.answering import Answering
from drivetrain.generation.served_answers import ServedAnswers
from drivetrain.runtime.journal import Journal
from drivetrain.workloads.base import Batch, Workload
from drivetrain.workloads.generating import Came, Drawn, Generates, Prompt, dropped
from drivetrain.workloads.loss_contract import LossContext

T = TypeVar("T")


class Passes:
    """The engine's passes without gradient, in the form that `Workload`s which make samples use
    (workloads.base.Making)."""

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        ranks: Communicator,
        batch_size: int,
        journal: Journal | None = None,
        server: ServedAnswers | None = None,
    ) -> None:
        """batch_size: samples that run forward at once. journal: None keeps nothing beyond this object. server: draws
        the answers in the model's place."""
        self._engine, self._workload, self._ranks, self._batch_size = engine, workload, ranks, batch_size
        self.journal, self._server = journal or Journal(None, ranks.rank, ""), server

    def each(self, samples: Sequence[Any], work: Callable[[nn.Module, Batch, LossContext], Sequence[T]]) -> list[T]:
        """Returns the result of `work` for each sample, in their order: one result a sample of the batch that it gets.

        samples: this rank's, as `collate` takes them; ranks may have different numbers.
        """
        size = self._batch_size
        chunks = [list(samples[start : start + size]) for start in range(0, len(samples), size)]
        everyone = self._ranks.all_gather((len(chunks), list(samples[:1])))
        fillers = [first for _, first in everyone if first]
        missing = max(count for count, _ in everyone) - len(chunks)
        batches = [MicroBatch(self._workload.collate(each)) for each in [*chunks, *fillers[:1] * missing]]
        context = LossContext(self._engine.auxiliary)
        found = self._engine.without_gradient(batches, lambda model, batch: work(model, batch, context))
        return [result for results in found[: len(chunks)] for result in results]

    def once(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which of the ranks that share samples one does. An error is raised on all."""
        rank, counts = self._engine.data_rank, self._engine.counts_samples
        everyone = self._ranks.on_each(lambda: (rank, [work()] if counts else []))
        return next(found[0] for other, found in everyone if found and other == rank)

    def of_data_ranks(self, value: T) -> list[T]:
        """Returns the value of each rank that has samples of its own; of the ranks that share samples, one's."""
        counts = self._engine.counts_samples
        return [found[0] for found in self._ranks.all_gather([value] if counts else []) if found]

    @property
    def by_server(self) -> bool:
        return self._server is not None

    def answers(
        self, prompts: Sequence[Prompt], draws: Sequence[int], settings: Generation | None = None, came: Came = dropped
    ) -> list[Drawn]:
        """Returns an answer to each of this rank's prompts. settings: how they are chosen, where it
        is not by the workload's own.

        draws: a number for each, which with the run's seed decides what is drawn for it, independently of other
        prompts. came: called with each as it comes from a server. Raises ValueError if one comes twice.
        """
        assert isinstance(self._workload, Generates), "the workload's model writes no tokens"
        if len(set(draws)) < len(prompts):  # prompts of one number would get one answer
            raise ValueError(f"{len(prompts)} prompts have {len(set(draws))} different draws: give each its own")
        if self._server is not None:
            return self._server.answers(prompts, draws, settings or self._workload.settings, came, self.once)
        answering = Answering(self._engine, self._workload, self._ranks, self._batch_size)
        found = answering.own(prompts, draws, 0, settings, as_drawn=True, with_text=False)
        return [Drawn(list(each.tokens), [token.logprob for token in each.logprobs]) for each in found]
