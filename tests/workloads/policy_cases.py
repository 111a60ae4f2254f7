"""Answers of a tiny model with rewards, made up: for the tests of losses, and for parity."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.config.language import LanguageModel
from drivetrain.workloads.policy import PolicyWorkload
from tests.tiny_language import LLAMA, write_lines

ROWS = [{"instruction": f"say {number}", "output": str(number)} for number in range(12)]
LENGTHS = (3, 9, 1, 6, 12, 5)  # of answers
LONGEST = 12


def configured(folder: Path, stage: str = "grpo", **given: Any) -> LanguageModel:
    data = {"train": write_lines(folder / "rows.jsonl", ROWS), "template": "plain", "length": 40}
    data |= {"evaluation_fraction": 0.25, "cache": str(folder / "cache"), **given.pop("data", {})}
    learning = {"rewards": "exact_match", "max_new_tokens": LONGEST, "answers": 3, **given}
    block = {"stage": stage, "model": {"config": {**LLAMA, "vocab_size": 260}}, "data": data, "reinforcement": learning}
    found = LanguageModel.model_validate(block)
    return found.model_copy(update={"reinforcement": found.reinforcement.settled(None)})


class Seeded(PolicyWorkload):
    """Its model starts alike, whatever was drawn before."""

    def build_model(self) -> nn.Module:
        torch.manual_seed(3)
        return super().build_model()


def workload(folder: Path, stage: str = "grpo", **given: Any) -> PolicyWorkload:
    return Seeded(configured(folder, stage, **given), seed=0)


def built(work: PolicyWorkload) -> nn.Module:
    return work.build_model().eval()


def made(reference: bool = True) -> list[dict[str, Any]]:
    """Six answers to prompts of several lengths, whose old log-probabilities are a little off."""
    generator = torch.Generator().manual_seed(7)
    found: list[dict[str, Any]] = []
    for number, length in enumerate(LENGTHS):
        prompt = 2 + number
        ids = torch.randint(0, 250, (prompt + length,), generator=generator, dtype=torch.int32)
        advantage = (-1.5, 0.7, 0.0, 2.0, -0.4, 1.1)[number]
        sample = {"ids": ids, "prompt": prompt, "advantage": advantage, "learned": 1}
        for name in ("old", "reference"):
            sample[name] = -5.56 + 0.6 * torch.randn(length, generator=generator)
        if not reference:
            sample["reference"] = torch.zeros(0)
        found.append(sample)
    return found


def log_probabilities(model: nn.Module, sample: Mapping[str, Any], temperature: float = 1.0) -> Tensor:
    """One answer through the model by itself: log-probabilities of its tokens."""
    ids, prompt = sample["ids"].long(), sample["prompt"]
    logits = model(input_ids=ids[None, :-1]).logits[0, prompt - 1 :] / temperature
    return logits.log_softmax(-1).gather(1, ids[prompt:, None])[:, 0]


def loss_of(work: PolicyWorkload, model: nn.Module, samples: list[dict[str, Any]]) -> Tensor:
    """The engine's loss of one micro-batch."""
    from drivetrain.workloads.loss_contract import NO_CONTEXT

    batch = work.collate(samples)
    counts, sums = work.counts(batch), work.loss_sums(model, batch, NO_CONTEXT)
    return torch.stack([weight * sums[name] / counts[name] for name, weight in work.terms.items()]).sum()
