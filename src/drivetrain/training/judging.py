"""Evaluates a model by its answers to the evaluation's prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.errors import counted
from drivetrain.generation.passes import Passes
from drivetrain.workloads.generating import OF_REWARD, JudgedAnswer, JudgesAnswers


def judged(workload: JudgesAnswers, engine: Engine, batch_size: int, part: range | None) -> dict[int, JudgedAnswer]:
    """Returns the judged answer to each prompt by its number, the same on every rank. part: the prompts; None: all."""
    samples, ranks = workload.evaluation, Communicator()
    assert samples is not None
    numbers = list(range(len(samples)) if part is None else part)
    mine = numbers[engine.data_rank :: engine.data_world]
    passes = Passes(engine, workload, ranks, batch_size)
    found = workload.judged([samples.load(number, 0) for number in mine], mine, passes)
    own = dict(zip(mine, found, strict=True)) if engine.counts_samples else {}
    everyone = {number: row for share in ranks.all_gather(own) for number, row in share.items()}
    return {number: everyone[number] for number in numbers}


def means_of(rows: Sequence[JudgedAnswer]) -> dict[str, float]:
    """Returns the means of the answers' metrics. loss: the negative reward. A metric of which no answer has a value is
    left out."""
    means = {name: _mean([row.metrics[name] for row in rows]) for name in rows[0].metrics}
    values = {name: mean for name, mean in means.items() if mean is not None}
    reward = values.get("reward")
    return values if reward is None else {"loss": 0.0 - reward, **values}  # -0.0 would be printed as it is


def unrewarded(rows: Sequence[JudgedAnswer]) -> str | None:
    """Returns a warning that names the rewards and the reasons where no answer has a reward; None where one has."""
    if any(not math.isnan(row.metrics["reward"]) for row in rows):
        return None
    names = [name.removeprefix(OF_REWARD) for name in rows[0].metrics if name.startswith(OF_REWARD)]
    reasons = "; ".join(reason for name in names if (reason := _without(name, rows)))
    return (
        f"no answer of the evaluation has a reward ({reasons}): the evaluation has no metric reward, by which "
        "checkpoints are compared; give evaluation data to which the rewards apply"
    )


def _without(name: str, rows: Sequence[JudgedAnswer]) -> str:
    """Returns why a reward has no value for some answers; an empty text where it has one for all."""
    failed = [row.failures[name] for row in rows if name in row.failures]
    if failed:
        return f"{name} failed for {len(failed):,} of {counted(len(rows), 'answer')}: {failed[0]}"
    lacking = sum(math.isnan(row.metrics[f"{OF_REWARD}{name}"]) for row in rows)
    return f"{name} returned None for {lacking:,} of {counted(len(rows), 'answer')}" if lacking else ""


def _mean(values: list[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None
