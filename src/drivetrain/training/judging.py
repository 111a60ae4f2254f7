"""Evaluates a model by its answers to the evaluation's prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.generation.passes import Passes
from drivetrain.workloads.generating import JudgesAnswers


def judged(workload: JudgesAnswers, engine: Engine, batch_size: int, part: range | None) -> dict[int, dict[str, float]]:
    """Returns the metrics of each prompt by its number, the same on every rank. part: the prompts; None: all."""
    samples, ranks = workload.evaluation, Communicator()
    assert samples is not None
    numbers = list(range(len(samples)) if part is None else part)
    mine = numbers[engine.data_rank :: engine.data_world]
    passes = Passes(engine, workload, ranks, batch_size)
    found = workload.judged([samples.load(number, 0) for number in mine], mine, passes)
    own = dict(zip(mine, found, strict=True)) if engine.counts_samples else {}
    everyone = {number: row for share in ranks.all_gather(own) for number, row in share.items()}
    return {number: everyone[number] for number in numbers}


def means_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the means of the prompts' metrics. loss: the negative reward. NaN stands for no value; a mean of none is
    NaN."""
    values = {name: _mean([row[name] for row in rows]) for name in rows[0]}
    return {"loss": -values["reward"], **values}


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
