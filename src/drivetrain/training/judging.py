"""Evaluates a model by its answers to the evaluation's prompts."""

from __future__ import annotations

import math

from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.generation.passes import Passes
from drivetrain.workloads.generating import JudgesAnswers


def judged(workload: JudgesAnswers, engine: Engine, batch_size: int, part: range | None) -> dict[str, float]:
    """Returns the means of the prompts' metrics, each prompt once; the same on every rank. loss: the negative reward.

    part: the prompts; None: all. NaN stands for no value; a mean of none is NaN.
    """
    samples, ranks = workload.evaluation, Communicator()
    assert samples is not None
    numbers = list(range(len(samples)) if part is None else part)
    mine = numbers[engine.data_rank :: engine.data_world]
    passes = Passes(engine, workload, ranks, batch_size)
    found = workload.judged([samples.load(number, 0) for number in mine], mine, passes)
    own = dict(zip(mine, found, strict=True)) if engine.counts_samples else {}
    everyone = {number: row for share in ranks.all_gather(own) for number, row in share.items()}
    rows = [everyone[number] for number in numbers]
    values = {name: _mean([row[name] for row in rows]) for name in rows[0]}
    return {"loss": -values["reward"], **values}


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
