"""Prompts continued under any engine, token by token.

Each token is a forward pass over the whole sequences, through the engine's own `predict`: no engine has to hold a whole
model or a cache of keys and values for it. The first rank tells all others each token, so that every rank takes the
same forward passes, whatever the last bits of its logits are.
"""

from __future__ import annotations

from typing import Any

from drivetrain.data.loader import MicroBatch
from drivetrain.engines.base import Engine
from drivetrain.ranks import Ranks
from drivetrain.rng import restore_rng_state, rng_state
from drivetrain.workloads.base import Generates


def generate(engine: Engine, workload: Generates, ranks: Ranks) -> list[dict[str, Any]]:
    """{"prompt", "answer", "reference"} of each of the workload's prompts. All ranks call it together.

    Training goes on as if nothing had happened: random generators end as they were.
    """
    state = rng_state()
    prompts = workload.prompts
    written: list[list[int]] = [[] for _ in prompts]
    going = list(range(len(prompts)))
    while going := [number for number in going if not workload.is_over(prompts[number], written[number])]:
        sequences = {number: [*prompts[number].ids, *written[number]] for number in going}
        # all ranks of a data-parallel engine have the same prompts: those of the first count
        batch = MicroBatch(workload.next_batch(sequences), counts=engine.data_rank == 0)
        rows = list(engine.predict([batch]))
        tokens = ranks.on_first(lambda rows=rows: [row["token"] for row in rows])  # type: ignore[misc]
        for number, token in zip(going, tokens, strict=True):
            written[number].append(token)
    restore_rng_state(state)
    return [
        {"prompt": prompt.text, "answer": workload.answer(tokens), "reference": prompt.reference}
        for prompt, tokens in zip(prompts, written, strict=True)
    ]
