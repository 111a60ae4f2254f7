"""Distils a model on replies that it writes itself, a share of all: generalised knowledge distillation, Agarwal et al.
2024, "On-Policy Distillation of Language Models", algorithm 1. The model learns from its teacher what to do in the
states that its own replies lead to.

At each step some of the samples, drawn at random, have their last reply replaced by one that the model draws as it is
then. No gradient flows through the drawing. The other samples, and the evaluation, are of the data's replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from drivetrain.config.language import LanguageModel
from drivetrain.data.language.samples import Sample
from drivetrain.data.ordered_cuts import OrderedSizes
from drivetrain.workloads.base import Batch
from drivetrain.workloads.distillation import DistillationWorkload
from drivetrain.workloads.generating import MakesSamples, Making, Prompt, Rollout
from drivetrain.workloads.language_prompts import prompt_of_sample
from drivetrain.workloads.made_answers import drawn_answers


class OwnAnswersWorkload(DistillationWorkload, MakesSamples):
    server_field, reads_logprobs = "workload.distillation.server", False

    def __init__(self, config: LanguageModel, seed: int) -> None:
        super().__init__(config, seed)
        self.server, self.longest_made = config.distillation.server, config.data.length

    @property
    def updates_per_batch(self) -> int:
        return 1

    def collate(self, samples: Sequence[Any]) -> Batch:
        """samples: of the data, or as `make_samples` returns them."""
        return super().collate([_plain(each) if isinstance(each, dict) else each for each in samples])

    def shown(self, sample: Any) -> str:
        return super().shown(_plain(sample) if isinstance(sample, dict) else sample)

    @property
    def lengths(self) -> Sequence[int] | None:
        """Returns None: the lengths of replies are not known before they are made."""
        return None

    def made_sizes(self, samples: Sequence[Any]) -> OrderedSizes:
        tokens = np.array([len(each["ids"] if isinstance(each, dict) else each[0]) for each in samples], np.int64)
        return OrderedSizes(tokens, np.zeros_like(tokens), self.packs)

    # --- replies ------------------------------------------------------------------------------------------------------

    def make_samples(self, prompts: Sequence[Any], draws: Sequence[int], passes: Making) -> Sequence[Sequence[Any]]:
        """Returns each sample of the data as it is, or up to its last reply with one of the model's own."""
        block, room = self._config.distillation, self._config.data.length
        asked: dict[int, Prompt] = {}
        for number, draw in enumerate(draws):
            prompt = prompt_of_sample(prompts[number], self.tokenizer) if _is_own(draw, block.own_answers) else None
            if prompt is not None and len(prompt.ids) < min(room, self.places or room):
                asked[number] = prompt
        answers = drawn_answers([*asked.values()], [draws[number] for number in asked], block.drawing, passes)
        made = [_made(each, own=0) for each in prompts]
        for (number, prompt), (drawn, _) in zip(asked.items(), answers, strict=True):
            ids = np.array([*prompt.ids, *drawn.tokens][:room], dtype=np.int32)
            made[number] = _made((ids, np.arange(len(ids)) >= len(prompt.ids)), own=1, expected=prompt.reference)
        return [[each] for each in made]

    def rollout(self) -> Rollout:
        own = [each for each in self.made if each["own"]]
        sizes = [int(each["targets"].sum()) for each in own]
        ended = [int(each["ids"][-1]) in self.ends for each in own]
        found = {"own_answers": len(own) / max(1, len(self.made))}
        if own:
            found |= {"answer_tokens": sum(sizes) / len(own), "truncated": 1 - sum(ended) / len(own)}
        return Rollout(found, [self._in_words(each) for each in own], [])

    def _in_words(self, made: dict[str, Any]) -> dict[str, Any]:
        """Returns a reply of the model's as samples.jsonl has it."""
        ids, size = made["ids"].tolist(), int(made["targets"].sum())
        answer = {"prompt": self.decoded(ids[:-size]), "answer": self.decoded(ids[-size:])}
        return {**answer, "reference": made["expected"], "answer_tokens": size}


def _is_own(draw: int, share: float) -> bool:
    """Returns whether the model writes the reply of that draw itself."""
    return bool(np.random.default_rng([draw, 1]).random() < share)


def _made(sample: Sample, own: int, expected: str | None = None) -> dict[str, Any]:
    """Returns a sample in the forms of a checkpoint."""
    ids, targets = sample
    return {"ids": torch.from_numpy(ids), "targets": torch.from_numpy(targets), "own": own, "expected": expected}


def _plain(made: dict[str, Any]) -> Sample:
    return made["ids"].numpy(), made["targets"].numpy()
