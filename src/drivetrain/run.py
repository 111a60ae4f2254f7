"""The story on one page: config → workload → engine → loop → report."""

from __future__ import annotations

import functools
import signal
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from drivetrain import environment
from drivetrain.assemble import assemble
from drivetrain.checkpointing import RunCheckpoints
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.data.loader import evaluation_batches, training_windows
from drivetrain.data.order import GlobalOrder
from drivetrain.engines.base import Engine
from drivetrain.folder import RunFolder
from drivetrain.hardware import torch_device
from drivetrain.loop import Progress, Surroundings, train
from drivetrain.measure.meters import Meters
from drivetrain.measure.throughput import Stopwatch
from drivetrain.precision import arithmetic, is_emulated
from drivetrain.report import RunReport, Status
from drivetrain.signals import StopRequest, stop_on_signals
from drivetrain.tracking.build import EventStream, build_trackers
from drivetrain.tracking.events import RunFinished, RunStarted, Warned
from drivetrain.workload_rules import best_metric
from drivetrain.workloads.base import Workload

INTERRUPTED_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def run(
    config: RunConfig,
    machine: Machine,
    warnings: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> tuple[RunReport, int]:
    """Train. Returns the report and the exit code: 0, or 130 / 143 if a signal ended the run after a save."""
    with arithmetic(config.precision_spec, machine), stop_on_signals() as stop:
        stopwatch = Stopwatch(torch_device(machine))
        workload, engine = assemble(config, machine, training=True, part=stopwatch.part)
        folder = RunFolder(config.folder)
        folder.prepare(resume, overwrite)
        folder.describe(config, environment.describe(machine))
        events = EventStream(build_trackers(config.tracking.trackers, folder.path, quiet))
        try:
            for message in (*warnings, *workload.warnings):
                events.send(Warned(message=message))
            meters = Meters(machine, config.precision_spec, engine, not config.compile, stopwatch)
            report = _train(config, machine, workload, engine, meters, folder, events, resume, stop)
        except BaseException as error:
            events.send(RunFinished(status="failed", step=-1, message=f"{type(error).__name__}: {error}"))
            raise
        finally:
            events.close()
            engine.close()
    code = INTERRUPTED_CODES[signal.Signals(stop.signal_number)] if report.status == "interrupted" else 0  # type: ignore[arg-type]
    return report, code


def _train(
    config: RunConfig,
    machine: Machine,
    workload: Workload,
    engine: Engine,
    meters: Meters,
    folder: RunFolder,
    events: EventStream,
    resume: bool,
    stop: StopRequest,
) -> RunReport:
    order = GlobalOrder(len(workload.train), config.global_batch(engine.data_world), config.seed, workload.lengths)
    total_steps = config.loop.steps or order.steps_per_epoch * config.loop.epochs  # type: ignore[operator]
    metric = best_metric(config, workload)
    checkpoints = RunCheckpoints(folder.checkpoints, config, engine, metric, len(workload.train), events.send)
    progress = checkpoints.restore() if resume else Progress()
    events.send(_started(config, workload, engine, total_steps, progress, folder))
    windows = training_windows(
        workload.train,
        workload.collate,
        order,
        range(progress.step, total_steps),
        config.micro_batch_size or order.batch_size,
        config.loader,
        engine.data_rank,
        engine.data_world,
        pin_memory=machine.device == "cuda",
    )
    around = Surroundings(
        evaluate=functools.partial(evaluate, config, workload, engine) if workload.evaluation is not None else None,
        save=checkpoints.save,
        send=events.send,
        stop=stop,
        best_metric=metric,
        meters=meters,
    )
    with meters:
        status = train(engine, windows, config, total_steps, order.steps_per_epoch, progress, around)
    report = _report(config, machine, workload, engine, checkpoints, progress, meters, status, order.steps_per_epoch)
    report.write(folder.report)
    events.send(RunFinished(status=status, step=progress.step, message=_closing(status, progress, checkpoints)))
    return report


def evaluate(config: RunConfig, workload: Workload, engine: Engine) -> dict[str, float]:
    """Loss and metrics over the evaluation data, every sample once."""
    assert workload.evaluation is not None
    size = config.evaluation.batch_size or config.micro_batch_size or config.global_batch()
    batches = evaluation_batches(workload.evaluation, workload.collate, size, config.loader)
    return engine.evaluate(batches, workload.metrics())


def _started(
    config: RunConfig, workload: Workload, engine: Engine, total_steps: int, progress: Progress, folder: RunFolder
) -> RunStarted:
    facts = {"precision": config.precision, "engine": config.engine.name, **asdict(engine.engaged()), **workload.facts}
    return RunStarted(
        name=config.name,
        output=str(folder.path),
        total_steps=total_steps,
        first_step=progress.step,
        samples_per_epoch=len(workload.train),
        facts=facts,
    )


def _closing(status: Status, progress: Progress, checkpoints: RunCheckpoints) -> str:
    saved = checkpoints.newest()
    if status == "interrupted":
        return f"interrupted and saved at step {progress.step} in {saved}; go on with --resume"
    return f"{status.replace('_', ' ')} at step {progress.step}; newest checkpoint {saved}"


def _report(
    config: RunConfig,
    machine: Machine,
    workload: Workload,
    engine: Engine,
    checkpoints: RunCheckpoints,
    progress: Progress,
    meters: Meters,
    status: Status,
    steps_per_epoch: int,
) -> RunReport:
    newest, best = checkpoints.newest(), checkpoints.best()
    measured: dict[str, Any] = meters.summary()
    return RunReport(
        name=config.name,
        status=status,
        precision=config.precision,
        emulated=is_emulated(config.precision_spec, machine),
        engine=config.engine.name,
        device=machine.device_name,
        engaged=asdict(engine.engaged()),
        steps=progress.step,
        skipped_steps=progress.skipped,
        epochs=progress.step / steps_per_epoch,
        samples=progress.samples,
        metrics=progress.metrics,
        best=progress.best,
        seconds=progress.elapsed_seconds,
        data=workload.facts,
        checkpoint=str(newest) if newest else None,
        best_checkpoint=str(best) if best else None,
        versions=environment.versions(),
        **measured,
    )
