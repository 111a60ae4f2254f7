"""What each data set of a mixture had of a training, and how well it goes on each: for the report and the events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.data.order import Order
from drivetrain.workloads.base import Workload

Evaluate = Callable[[range], dict[str, float]]


def mixture_report(workload: Workload, order: Order, step: int, evaluated: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return of each data set: its name, the samples that steps 1 to `step` took of it, their share of all, and what
    `evaluated` has of its evaluation data. Empty where there is no mixture."""
    names, counts = workload.data_sets, order.drawn_before(step)
    total = max(1, sum(counts))
    return [
        {"name": name, "samples": count, "share": round(count / total, 6), **evaluated.get(name, {})}
        for name, count in zip(names, counts, strict=False)
    ]


def evaluated_by_set(workload: Workload, evaluate: Evaluate) -> dict[str, dict[str, float]]:
    """Return loss and metrics on each data set's evaluation data, where there are several. All ranks take part."""
    parts = workload.evaluation_parts
    return {name: evaluate(part) for name, part in parts.items()} if len(parts) > 1 else {}
