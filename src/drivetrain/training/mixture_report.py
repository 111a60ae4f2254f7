"""Counts how much of a training each data set of a mixture had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drivetrain.config.run import RunConfig
from drivetrain.data.order import Order
from drivetrain.workloads.base import Workload


def mixture_report(workload: Workload, order: Order, step: int, evaluated: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns for each data set its name, the samples that steps 1 to `step` took of it, their share of all, and its
    entry in `evaluated`. Empty if there is no mixture."""
    names, counts = workload.data_sets, order.drawn_before(step)
    total = max(1, sum(counts))
    return [
        {"name": name, "samples": count, "share": round(count / total, 6), **evaluated.get(name, {})}
        for name, count in zip(names, counts, strict=False)
    ]


def cadence_notes(config: RunConfig, order: Order) -> Iterator[str]:
    """Yields remarks on events that happen only at the end, because the epochs of a stream under loop.steps are not
    counted."""
    if order.num_samples is None and config.evaluation.every_steps is None:
        what = "evaluations come" if config.checkpoints.every_steps else "evaluations and checkpoints come"
        yield (
            f"the epochs of a stream are not counted under loop.steps: {what} at the end only, unless "
            "evaluation.every_steps or checkpoints.every_steps says when"
        )
