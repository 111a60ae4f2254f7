"""The end of a training: its report, and the lines that the run prints last."""

from __future__ import annotations

import socket
import time
from dataclasses import asdict
from typing import Any

from drivetrain.data.order import Order
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.measure.meters import Meters
from drivetrain.numerics.torch_precision import is_emulated
from drivetrain.runtime import environment
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.training.context import TrainingContext
from drivetrain.training.mixture_report import mixture_report
from drivetrain.training.progress import Progress
from drivetrain.training.report import RunReport, Status
from drivetrain.training.run_checkpoints import RunCheckpoints
from drivetrain.training.workload_rules import best_metric, metric_directions
from drivetrain.workloads.generating import MakesSamples


def earlier_report(folder: RunFolder, status: Status, progress: Progress) -> RunReport | None:
    """Returns the report of a finished run, or None."""
    try:
        found = RunReport.read(folder.report)
    except (OSError, ValueError):
        return None
    if found.steps != progress.step:
        return None
    if found.status != status:  # by another patience or length than that start had
        found = found.model_copy(update={"status": status})
        found.write(folder.report)
    return found


def closing_lines(status: Status, progress: Progress, checkpoints: RunCheckpoints, trained_nothing: bool) -> str:
    """Returns the lines that the run prints last."""
    saved, at = checkpoints.newest(), f"at step {progress.step}"
    if progress.skipped:
        at += f" ({progress.skipped} skipped, so {progress.updates} updates)"
    if status == "interrupted" and saved is None:
        return "interrupted before the first step; --resume begins it with the answers that came"
    if status == "interrupted":
        return f"interrupted and saved {at} in {saved}; go on with --resume"
    why = f", {progress.evaluations_without_gain} evaluations without a gain" if status == "stopped_early" else ""
    summary = f"{status.replace('_', ' ')} {at}{why}; newest checkpoint {saved}"
    if not trained_nothing:
        return summary
    more = "a larger evaluation.early_stopping.patience" if status == "stopped_early" else "a longer loop"
    return f"{summary}; nothing was left to train: {more} goes on"


def report_of(
    parts: TrainingContext, checkpoints: RunCheckpoints, progress: Progress, status: Status, order: Order
) -> RunReport:
    config, machine = parts.config, parts.machine
    metric = best_metric(config, parts.workload)
    newest, best = parts.ranks.on_first(lambda: (checkpoints.newest(), checkpoints.best(progress)))
    return RunReport(
        name=config.name,
        status=status,
        precision=config.precision,
        emulated=is_emulated(config.precision_spec, machine),
        engine=config.engine.label,
        device=machine.device_name,
        engaged=asdict(parts.engine.engaged()),
        chosen=parts.chosen,
        steps=progress.step,
        skipped_steps=progress.skipped,
        epochs=progress.step / order.steps_per_epoch,
        mixture=mixture_report(parts.workload, order, progress.step, progress.by_set),
        samples=progress.samples,
        metrics=progress.metrics,
        best=None if progress.best is None else {**progress.best, "higher_is_better": metric.higher_is_better},
        directions=metric_directions(config, parts.workload, progress.metrics),
        answers=parts.workload.rollout_means() if isinstance(parts.workload, MakesSamples) else {},
        terms=progress.terms,
        seconds=progress.elapsed_seconds,
        data=parts.workload.facts,
        checkpoint=str(newest) if newest else None,
        best_checkpoint=str(best) if best else None,
        versions=environment.versions(),
        **measured(parts.meters, parts.engine, parts.ranks),
    )


def effective(parts: TrainingContext, elapsed_seconds: float, before: float) -> dict[str, Any]:
    """Returns shares of the time since the launch began; all ranks call it. A late machine knows less."""
    attempt = parts.attempt
    launches = parts.ranks.all_gather((time.monotonic() - attempt.since, list(attempt.restarts), before))
    lasted, restarts, _ = max(launches, key=lambda launch: launch[0])
    share = (elapsed_seconds - min(before for _, _, before in launches)) / max(1e-9, lasted)
    return {"restarts": restarts, "effective_share": min(1.0, share)}


def measured(meters: Meters, engine: Engine, ranks: Communicator) -> dict[str, Any]:
    """Returns the measured fields of a RunReport; all ranks must call it."""
    summary = meters.summary(ranks)
    engaged = engine.engaged()
    own = {"host": socket.gethostname(), "local_parameters": engaged.local_parameters, **engine.measured()}
    for shown, gathered in zip(summary["ranks"], ranks.all_gather(own), strict=True):
        shown.update(gathered)
    return summary
