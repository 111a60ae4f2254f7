"""Counts how much of a training each data set of a mixture had, and evaluates each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.config.run import RunConfig
from drivetrain.data.fixed_rows import filled_in_order
from drivetrain.data.order import Order
from drivetrain.tracking.events import Event, MixtureEvaluated
from drivetrain.training.loop import Progress
from drivetrain.workloads.base import Workload


@dataclass(frozen=True)
class EvaluationBySet:
    """The evaluation of a run. In a mixture, each data set's part is evaluated once more by itself: the values over all
    stay those of one pass, to the bit. evaluate: over a part, or over all (None)."""

    evaluate: Callable[[range | None], dict[str, float]]
    workload: Workload
    order: Order
    progress: Progress
    by_set: bool
    send: Callable[[Event], None]

    def __call__(self) -> dict[str, float]:
        """Returns loss and metrics over all evaluation data; sends those of each data set. All ranks take part."""
        values = self.evaluate(None)
        if not self.workload.data_sets:
            return values
        parts = self.workload.evaluation_parts if self.by_set else {}
        self.progress.by_set = {name: self.evaluate(part) for name, part in parts.items()} if len(parts) > 1 else {}
        sets = mixture_report(self.workload, self.order, self.progress.step, self.progress.by_set)
        self.send(MixtureEvaluated(step=self.progress.step, sets=sets))
        return values


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


def evaluation_cuts(workload: Workload, bound: int, part: range | None) -> list[range] | None:
    """Returns the samples of each of the evaluation's batches, or those of a part of it; None for `bound` after `bound`
    of all. If packed rows have one length, batches fill them: one shape for all."""
    lengths = workload.evaluation_lengths
    if workload.rows is None or lengths is None:
        return None if part is None else [part[start : start + bound] for start in range(0, len(part), bound)]
    if part is None:
        return filled_in_order(lengths, workload.rows, bound)
    cuts = filled_in_order(lengths[part.start : part.stop], workload.rows, bound)
    return [range(part.start + cut.start, part.start + cut.stop) for cut in cuts]
