"""Answers under the engines that spread a model, whose weights no rank need hold whole: those of one device."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from drivetrain.config.engines import EngineConfig
from drivetrain.config.language import LanguageModel
from drivetrain.distributed.communicator import Communicator
from drivetrain.generation.answering import Answering
from drivetrain.generation.requests import Answer
from drivetrain.workloads.generating import Prompt
from drivetrain.workloads.language_model import LanguageModelWorkload
from tests import tiny_language
from tests.ranks import RankPool
from tests.tiny_workload import tiny_engine

# of different lengths and an odd number, so that ranks with fewer or shorter answers wait for the others
ASKED = ("say 7", "say 1 and then 2", "?", "a longer question than all of the others here", "say 3")
NEW = 12
ENGINES: Mapping[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "fsdp": {"name": "fsdp"},
    "zero3": {"name": "deepspeed", "stage": 3},
    "tp": {"name": "mesh", "tp": 2},
}
DEALT = {"ddp": [3, 2], "fsdp": [3, 2], "zero3": [3, 2], "tp": [5, 5]}  # ranks of tp share their samples


class Seeded(LanguageModelWorkload):
    def build_model(self) -> nn.Module:
        torch.manual_seed(3)
        return super().build_model()


class Counting(Answering):
    """Notes how many prompts this rank was dealt."""

    prompts = 0

    def own(self, prompts: Sequence[Prompt], *given: Any, **more: Any) -> list[Answer]:
        self.prompts = len(prompts)
        return super().own(prompts, *given, **more)


def work() -> Seeded:
    folder = Path(tempfile.gettempdir()) / f"answers-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    path = tiny_language.write_lines(folder / "rows.jsonl", tiny_language.ROWS)
    block = {
        "stage": "sft",
        "model": {"config": {**tiny_language.LLAMA, "vocab_size": 260}},  # even, for tp
        "data": {"train": path, "length": 96, "cache": folder / "cache", "evaluation": path, "template": "chatml"},
        "generate": {"prompts": list(ASKED), "samples": 0, "max_new_tokens": NEW},
    }
    return Seeded(LanguageModel.model_validate(block), 0)


def answered(engines: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[tuple[tuple[int, ...], float]]]]:
    """Of each engine, on one rank: the prompts that it was dealt, and all answers, tokens and log-probability."""
    found = []
    for given in engines:
        own, world = work(), torch.distributed.get_world_size()
        config: Any = TypeAdapter(EngineConfig).validate_python(given)
        engine = tiny_engine(own, config=config, devices=world)
        answering = Counting(engine, own, Communicator(), 2)  # rows: fewer than prompts
        answers = answering.dealt(dict(enumerate(own.prompts)), top_logprobs=0)
        values = [(answer.tokens, sum(each.logprob for each in answer.logprobs)) for answer in answers.values()]
        found.append((answering.prompts, values))
        engine.close()
    return found


def by_transformers() -> list[tuple[tuple[int, ...], float]]:
    """Returns the same by plain Transformers, each prompt by itself."""
    own = work()
    model: Any = own.build_model().eval()
    found = []
    for prompt in own.prompts:
        ids = torch.tensor([prompt.ids])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=sorted(own.ends),
            pad_token_id=0,
        )
        new = made[0, ids.shape[1] :]
        with torch.no_grad():
            scores = model(made).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
        found.append((tuple(new.tolist()), scores.gather(1, new[:, None]).sum().item()))
    return found


@pytest.mark.slow
def test_answers_under_every_engine_are_those_of_transformers_on_one_device(
    ranks: Callable[[int], RankPool],
) -> None:
    of_ranks = ranks(2).run(answered, list(ENGINES.values()))
    known = by_transformers()
    assert len({tokens for tokens, _ in known}) > 1, "the prompts have different answers"
    for number, name in enumerate(ENGINES):
        assert [rank[number][0] for rank in of_ranks] == DEALT[name], name
        for rank in of_ranks:
            for (tokens, logprob), (own, expected) in zip(rank[number][1], known, strict=True):
                assert tokens == own, name
                assert logprob == pytest.approx(expected, rel=1e-4), name
