"""The rows of predictions: what the workload predicts for each sample, and a language model's answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drivetrain.config.run import RunConfig
from drivetrain.data.loader import evaluation_batches
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.generation.answering import Answering
from drivetrain.generation.requests import Answer
from drivetrain.workloads.base import NamedSamples, Workload
from drivetrain.workloads.generating import Generates, Prompt

ROUNDS = 16  # batches of each rank whose samples are answered together, so that few wait for the longest answer
WITHOUT = dict.fromkeys(("prompt", "answer", "reference", "answer_tokens", "logprob", "finish_reason"))


class PredictedRows:
    """Yields rows on the first rank; all ranks must exhaust them."""

    def __init__(self, run: RunConfig, workload: Workload, engine: Engine, ranks: Communicator) -> None:
        self._run, self._workload, self._engine, self._ranks = run, workload, engine, ranks
        self._answering: Answering | None = None
        if isinstance(workload, Generates):
            self._answering = Answering(engine, workload, ranks, run.evaluation_batch)
        # rows that come together, as the answers of many prompts do
        self.at_once = 1 if self._answering is None else ROUNDS * run.evaluation_batch * engine.data_world

    def of_prompts(self, prompts: Sequence[Prompt], start: int) -> Iterator[dict[str, Any]]:
        """Yields {"sample": its name or number, ...its answer} of each prompt from `start` on."""
        assert self._answering is not None, "the workload generates"
        for first in range(start, len(prompts), self.at_once):
            part = dict(enumerate(prompts[first : first + self.at_once], first))
            for number, row in self._answers(part).items():
                if self._ranks.is_first:
                    name = part[number].name
                    yield {"sample": number if name is None else name, **row}

    def of_samples(self, samples: NamedSamples, start: int) -> Iterator[dict[str, Any]]:
        """Yields {"sample": name, ...} of each sample from `start` on. Samples without a prompt have an answer's
        columns too. The batch in which `start` lies runs whole: outputs depend on their batch in the last bits."""
        world, size = self._engine.data_world, self._run.evaluation_batch
        firsts = range(start // size * size, len(samples), size)
        cuts = [range(first, min(first + size, len(samples))) for first in firsts]
        workload = self._workload
        answers = isinstance(workload, Generates) and workload.answers_samples
        at_once = ROUNDS * world if answers else len(cuts)
        for turn in range(0, len(cuts), at_once):
            part = cuts[turn : turn + at_once]
            batches = evaluation_batches(
                samples, workload.collate, size, self._run.loader, self._engine.data_rank, world, part
            )
            rows = self._engine.predict(batches)
            numbers = range(part[0].start, part[-1].stop)
            found: dict[int, dict[str, Any]] = {}
            if isinstance(workload, Generates) and answers:
                predicted = list(rows)
                found = self._answers(workload.prompts_for(samples, numbers))
                rows = ({**row, **found.get(number, WITHOUT)} for number, row in zip(numbers, predicted, strict=False))
            for number, row in zip(numbers if self._ranks.is_first else (), rows, strict=True):
                if number >= start:
                    yield {"sample": samples.names[number], **workload.described(samples, number), **row}

    def _answers(self, prompts: Mapping[int, Prompt]) -> dict[int, dict[str, Any]]:
        assert self._answering is not None, "the workload generates"
        found = self._answering.dealt(prompts, top_logprobs=0)
        return {number: _row(prompts[number], answer) for number, answer in found.items()}


def _row(prompt: Prompt, answer: Answer) -> dict[str, Any]:
    """logprob: the sum of the tokens' log-probabilities under the model, the end token's among them."""
    return {
        "prompt": prompt.text,
        "answer": answer.text,
        "reference": prompt.reference,
        "answer_tokens": len(answer.tokens),
        "logprob": round(sum(each.logprob for each in answer.logprobs), 6),
        "finish_reason": answer.finish_reason,
    }
