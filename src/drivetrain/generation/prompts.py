"""Continues prompts under any engine, token by token.

Each token is a forward pass over the whole sequences, through the engine's own `predict`: no engine has to hold a whole
model or a cache of keys and values for it. The first rank sends each token to all others, so that every rank takes the
same forward passes, even if the last bits of its logits differ.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from drivetrain.data.loader import MicroBatch
from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.rng import restore_rng_state, rng_state
from drivetrain.engines.base import Engine
from drivetrain.workloads.generating import Generates, Prompt


def generate(engine: Engine, workload: Generates, ranks: Communicator) -> list[dict[str, Any]]:
    """Returns {"prompt", "answer", "reference"} of each of the workload's prompts. All ranks call it together."""
    return list(answers(engine, workload, ranks, dict(enumerate(workload.prompts))).values())


def answers(
    engine: Engine, workload: Generates, ranks: Communicator, prompts: Mapping[int, Prompt]
) -> dict[int, dict[str, Any]]:
    """Returns prompt's number → {"prompt", "answer", "reference"}. All ranks call it together.

    Training is not affected: random generators end as they were.
    """
    state = rng_state()
    written: dict[int, list[int]] = {number: [] for number in prompts}
    going = list(prompts)
    while going := [number for number in going if not workload.is_over(prompts[number], written[number])]:
        sequences = {number: [*prompts[number].ids, *written[number]] for number in going}
        # all ranks of a data-parallel engine have the same prompts: those of the first count
        batch = MicroBatch(workload.next_batch(sequences), counts=engine.data_rank == 0)
        with uncompiled():
            rows = list(engine.predict([batch]))
        tokens = ranks.on_first(lambda rows=rows: [row["token"] for row in rows])  # type: ignore[misc]
        for number, token in zip(going, tokens, strict=True):
            written[number].append(token)
    restore_rng_state(state)
    return {
        number: {"prompt": prompt.text, "answer": workload.answer(written[number]), "reference": prompt.reference}
        for number, prompt in prompts.items()
    }


def uncompiled() -> AbstractContextManager[Any]:
    """Runs without compilation: sequences grow with each token, and every length would be compiled. A compiler that was
    never imported has compiled nothing."""
    has_compiled = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if has_compiled else nullcontext()
