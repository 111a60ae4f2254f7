"""Passes of the model over samples that each rank has of its own: log-probabilities of them, and answers to prompts.

An engine's forward pass may communicate with the other ranks, so all of them run equally many: a rank that has fewer
batches, or whose answers are complete, repeats one whose results it drops. All ranks call each method together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from drivetrain.data.loader import MicroBatch
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.generation.prompts import uncompiled
from drivetrain.workloads.base import Batch, Workload
from drivetrain.workloads.generating import Generates, Prompt
from drivetrain.workloads.loss_contract import LossContext

T = TypeVar("T")


class Passes:
    """The engine's passes without gradient, in the form that `Workload`s which make samples use
    (workloads.base.Making)."""

    def __init__(self, engine: Engine, workload: Workload, ranks: Communicator, batch_size: int) -> None:
        """batch_size: samples that run forward at once."""
        self._engine, self._workload, self._ranks, self._batch_size = engine, workload, ranks, batch_size

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

    def answers(self, prompts: Sequence[Prompt], draws: Sequence[int]) -> list[list[int]]:
        """Returns the new tokens of an answer to each of this rank's prompts.

        draws: a number for each, which with the run's seed decides what is drawn for it, independently of other
        prompts. Raises ValueError if one comes twice.
        """
        workload = self._workload
        assert isinstance(workload, Generates), "the workload's model writes no tokens"
        asked = dict(zip(draws, prompts, strict=True))
        if len(asked) < len(prompts):  # prompts of one number would get one answer
            raise ValueError(f"{len(prompts)} prompts have {len(asked)} different draws: give each its own")
        written: dict[int, list[int]] = {number: [] for number in asked}
        while True:
            going = [n for n, prompt in asked.items() if not workload.is_over(prompt, written[n])]
            sequences = {n: [*asked[n].ids, *written[n]] for n in going}
            everyone = self._ranks.all_gather(_first(sequences))
            some = next((each for each in everyone if each), None)
            if some is None:
                return [written[number] for number in draws]
            batch = MicroBatch(workload.next_batch(sequences or some))
            with uncompiled():
                [rows] = self._engine.without_gradient([batch], workload.predict)
            for number, token in zip(going, self._agreed([row["token"] for row in rows]), strict=False):
                written[number].append(token)

    def _agreed(self, tokens: list[int]) -> list[int]:
        """Makes ranks that share samples go on with the same tokens, even if the last bits of their logits differ."""
        rank = self._engine.data_rank
        everyone = self._ranks.all_gather((rank, self._engine.counts_samples, tokens))
        return next(found for other, counts, found in everyone if other == rank and counts)


def _first(sequences: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
    return {number: ids for number, ids in list(sequences.items())[:1]}
