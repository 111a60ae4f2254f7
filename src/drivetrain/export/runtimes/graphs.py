"""Scores and greedy answers by a graph, a function of named inputs to scores; texts by the tokenizer beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version

import torch
from torch import Tensor

from drivetrain.export.runtimes.exchange import Answered, Asked
from drivetrain.export.runtimes.with_torch import rendered, tokenised, tokenizer_of

Graph = Callable[[dict[str, Tensor]], Tensor]


def answered(graph: Graph, asked: Asked, software: Sequence[str]) -> Answered:
    def scores_of(inputs: dict[str, Tensor]) -> Tensor:
        found = graph(inputs).float()
        return found if asked.keep is None else found[0, -asked.keep :]

    scores = [scores_of(inputs) for inputs in asked.inputs]
    start = time.perf_counter()
    for inputs in asked.inputs:
        scores_of(inputs)
    taken = time.perf_counter() - start
    answers = [_continued(graph, prompt, asked) for prompt in asked.prompts]
    tokenizer = tokenizer_of(asked)  # after the graph, which has to run without Transformers
    return Answered(
        scores=scores,
        answers=answers,
        dialogues=[rendered(tokenizer, dialogue) for dialogue in asked.dialogues],
        texts=[tokenised(tokenizer, text) for text in asked.texts],
        seconds=taken,
        software={name: version(name) for name in software},
    )


def _continued(graph: Graph, prompt: Sequence[int], asked: Asked) -> list[int]:
    """Returns new ids, by a pass over all ids for each."""
    new: list[int] = []
    while len(new) < asked.new_tokens and not (new and new[-1] in asked.ends):
        logits = graph({"input_ids": torch.tensor([[*prompt, *new]])})
        new.append(int(logits[0, -1].argmax()))
    return new
