"""Measures how quickly a run's model predicts, and at what cost: the same report as for a training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.data.loader import MicroBatch, evaluation_batches
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.errors import problem
from drivetrain.inference.weights import load_into, verified
from drivetrain.measure.meters import Meters
from drivetrain.measure.throughput import Stopwatch
from drivetrain.numerics.torch_precision import arithmetic, is_emulated
from drivetrain.runtime import environment
from drivetrain.runtime.hardware import torch_device
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.training.assemble import assemble
from drivetrain.training.evaluation import evaluate
from drivetrain.training.report import RunReport
from drivetrain.training.run_report import measured
from drivetrain.training.workload_rules import metric_directions
from drivetrain.workloads.base import Workload

LEAST_STEPS = 20  # the evaluation data are repeated until so many batches are predicted


def time_predictions(run: RunConfig, machine: Machine, checkpoint: str | None) -> RunReport:
    """Predicts the evaluation data at the run's batch and writes the report into the run's folder.

    checkpoint: a folder; None: fresh weights, which predict as quickly. Metrics are of one evaluation, not timed.
    """
    with arithmetic(run.precision_spec, machine):
        ranks, stopwatch = Communicator(), Stopwatch(torch_device(machine))
        workload, engine = assemble(run, machine, ranks, training=False)
        if workload.evaluation is None:
            raise problem("workload", "there are no evaluation data", "give evaluation data in the run file")
        if checkpoint is not None:
            load_into(engine, verified(Path(checkpoint)))
        folder = RunFolder(run.folder)
        ranks.on_first(lambda: folder.prepare(resume=False, overwrite=True))
        ranks.on_first(lambda: folder.describe(run, environment.describe(machine)))
        meters = Meters(machine, run.precision_spec, engine, not engine.compiled, stopwatch)
        with meters:
            batches = _predict(run, workload, engine, meters)
            metrics = evaluate(run, workload, engine)
        summary = measured(meters, engine, ranks)
        report = _report(run, machine, workload, engine, summary, meters.samples, batches, metrics)
    ranks.on_first(lambda: report.write(folder.report))
    return report


def _predict(run: RunConfig, workload: Workload, engine: Engine, meters: Meters) -> int:
    """Predicts all data repeatedly, until enough batches are timed; returns the number of rounds: a batch on each
    rank."""
    assert workload.evaluation is not None
    samples, size, world = workload.evaluation, run.evaluation.batch_size or run.micro_batch, engine.data_world
    done = 0

    def timed() -> Iterator[MicroBatch]:
        nonlocal done
        left = len(samples)
        for batch in evaluation_batches(samples, workload.collate, size, run.loader, engine.data_rank, world):
            with meters.step([batch]), meters.part("forward"):
                yield batch  # the engine computes until it asks for the next
            meters.step_done(min(left, size * world))
            left -= size * world
            done += 1

    while done < LEAST_STEPS:
        for _ in engine.predict(timed()):
            pass
    return done


def _report(
    run: RunConfig,
    machine: Machine,
    workload: Workload,
    engine: Engine,
    summary: dict[str, Any],
    samples: int,
    batches: int,
    metrics: dict[str, float],
) -> RunReport:
    return RunReport(
        name=run.name,
        verb="predict",
        status="completed",
        precision=run.precision,
        emulated=is_emulated(run.precision_spec, machine),
        engine=run.engine.label,
        device=machine.device_name,
        engaged=asdict(engine.engaged()),
        steps=batches,
        skipped_steps=0,
        epochs=samples / len(workload.evaluation or ()),
        samples=samples,
        metrics=metrics,
        directions=metric_directions(run, workload, metrics),
        best=None,
        seconds=sum(summary["seconds_by_part"].values()),
        data=workload.facts,
        checkpoint=None,
        best_checkpoint=None,
        versions=environment.versions(),
        **summary,
    )
