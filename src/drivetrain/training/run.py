"""A training on one page: config → workload → engine → loop → report."""

from __future__ import annotations

import functools
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from drivetrain.checkpoint.directory import clean_partials
from drivetrain.config.machine import Machine
from drivetrain.config.micro_batch_backoff import again
from drivetrain.config.run import RunConfig
from drivetrain.config.texts import texts
from drivetrain.distributed.communicator import Communicator
from drivetrain.generation.answering import sampler_beside
from drivetrain.generation.text_metrics import TextMetrics
from drivetrain.measure.meters import Meters
from drivetrain.measure.throughput import Stopwatch
from drivetrain.memory.garbage import collecting
from drivetrain.memory.shortage import room_for
from drivetrain.numerics.torch_precision import arithmetic
from drivetrain.runtime.attempt import Attempt
from drivetrain.runtime.hardware import torch_device
from drivetrain.runtime.heartbeat import Heart
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.runtime.signals import stop_on_signals
from drivetrain.tracking.build import EventStream, build_trackers
from drivetrain.tracking.events import Event, RunFinished, StepDone, Warned
from drivetrain.tracking.jsonl import FILE_NAME, odd_lines
from drivetrain.training import preflight
from drivetrain.training.anomalies import Anomalies
from drivetrain.training.assemble import assemble
from drivetrain.training.auto_settings import collect_every, order_of, total_steps_of
from drivetrain.training.batching import Batching, check_shares
from drivetrain.training.beginning import begun, refuse_beyond, refuse_lost, started_event
from drivetrain.training.context import TrainingContext
from drivetrain.training.evaluation import Evaluations
from drivetrain.training.hooks import LoopHooks
from drivetrain.training.loop import train
from drivetrain.training.mirroring import mirrored
from drivetrain.training.mixture_report import cadence_notes
from drivetrain.training.progress import Progress
from drivetrain.training.report import RunReport
from drivetrain.training.run_checkpoints import RunCheckpoints
from drivetrain.training.run_report import closing_lines, earlier_report, effective, report_of
from drivetrain.training.windows import own_tokens, source_of
from drivetrain.training.workload_rules import best_metric

INTERRUPTED_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def run(
    config: RunConfig,
    machine: Machine,
    warnings: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    attempt: Attempt | None = None,
    heart: Heart | None = None,
) -> tuple[RunReport, int]:
    """Trains. Returns the report and the exit code: 0, or 130 / 143 if a signal ended the run after a save.

    Called by every rank of the run; the first one writes and reports. attempt: the number of this start of its launch.
    heart: this process's record of its present step and part.
    """
    attempt = attempt or Attempt()
    with arithmetic(config.precision_spec, machine), stop_on_signals() as stop, ExitStack() as closing:
        ranks, stopwatch = Communicator(), Stopwatch(torch_device(machine), heart)
        given, config = config, _cut_as_fits(config, attempt, ranks)
        preflight.agree(config, ranks)
        folder = RunFolder(config.folder)
        # a rank on a machine that came late does not know that the run had begun
        resume = any(ranks.all_gather(resume or attempt.goes_on))
        mirror = closing.enter_context(mirrored(config, ranks, folder, resume, overwrite and not resume, heart, stop))
        with room_for("building the model"):
            workload, engine = assemble(config, machine, ranks, training=True, part=stopwatch.part)
        preflight.same_data(workload, ranks)
        ranks.on_first(lambda: preflight.start_processes(workload, keep=True))
        size = preflight.checkpoint_bytes(config, engine.shapes(), engine.engaged().trained_parameters)
        if resume:
            ranks.on_first(lambda: clean_partials(folder.checkpoints))  # what a kill left takes room
        lacking = ranks.on_first(lambda: preflight.disk(config, size, folder.checkpoints, overwrite and not resume))
        sources = texts(config.model_dump(mode="json"))
        ranks.on_first(lambda: folder.prepare(resume, overwrite, sources))
        attempt.prepared()
        events = EventStream([])
        try:
            if ranks.is_first:
                events = EventStream(build_trackers(config.tracking.trackers, folder.path, quiet), folder.path)
            odd = odd_lines(folder.path / FILE_NAME) if ranks.is_first else ()
            for message in (*attempt.notices, *warnings, *preflight.workload_notes(config, workload), *lacking, *odd):
                events.send(Warned(message=message))
            warn = functools.partial(_warn, events)
            meters = Meters(machine, config.precision_spec, engine, not engine.compiled, stopwatch, warn)
            report = _train(
                TrainingContext(
                    config, machine, ranks, workload, engine, meters, folder, events, stop, attempt, mirror, given
                ),
                resume,
            )
            events.close()
        except BaseException as error:
            events.close_failed(error)
            raise
        finally:
            not_begun = ranks.is_first and config.nodes == 1 and events.in_place and folder.put_back()
            if not_begun:
                attempt.unprepared()
            engine.close()
        # one rank may have got the signal for all
        number = max(ranks.all_gather(stop.signal_number or 0))
        ranks.close()
    return report, INTERRUPTED_CODES[signal.Signals(number)] if report.status == "interrupted" else 0


def _warn(events: EventStream, message: str) -> None:
    events.send(Warned(message=message))


def _cut_as_fits(config: RunConfig, attempt: Attempt, ranks: Communicator) -> RunConfig:
    """Continues with the smaller micro-batches of an earlier attempt, which only one of the machines may know."""
    known = [again(config, each) for each in ranks.all_gather(attempt.reduction)]
    return min(known, key=lambda run: run.micro_batch)


def _train(parts: TrainingContext, resume: bool) -> RunReport:
    config, workload, engine, ranks, events = parts.config, parts.workload, parts.engine, parts.ranks, parts.events
    order = order_of(config, workload)
    total_steps = total_steps_of(config, order)
    metric = best_metric(config, workload)
    checkpoints = RunCheckpoints(
        *(parts.folder.checkpoints, config, engine, ranks, metric, workload.train, events.send), parts.mirror.saved
    )
    cutting = Batching(
        *(config, parts.machine, workload, engine, order, total_steps, events.send, parts.given),
        covered=checkpoints.covered,
        is_stopping=lambda: parts.stop.signal_number is not None,
    )
    check_shares(order, cutting.slice, engine, ranks)
    progress = checkpoints.restore() if resume else Progress()
    if resume and progress.step == 0:
        ranks.on_first(lambda: refuse_lost(parts.folder))
    refuse_beyond(config, total_steps, progress)
    first_step = progress.step
    former = ranks.on_first(lambda: begun(parts, progress.step))
    parts.mirror.start(events.send, metric)
    if former:
        events.send(Warned(message=f"of steps that are made again: {parts.folder.trouble} keeps {', '.join(former)}"))
    before = parts.attempt.elapsed_before(progress.elapsed_seconds)
    network = preflight.timed_all_reduce(ranks, torch_device(parts.machine))
    events.send(started_event(parts, total_steps, progress, order.num_samples))
    for message in cadence_notes(config, order):
        events.send(Warned(message=message))
    evaluation = None
    if workload.evaluation is not None:
        evaluation = Evaluations(config, workload, engine, order, progress, events.send)
    around = LoopHooks(
        evaluate=evaluation,
        save=functools.partial(_save, parts, checkpoints),
        send=functools.partial(_send, parts),
        stop=lambda: ranks.any_asked(parts.stop.signal_number is not None),
        best_metric=metric,
        meters=parts.meters,
        generate=sampler_beside(engine, workload, ranks, config.evaluation_batch),
        score=functools.partial(_scored, TextMetrics(config.evaluation.generation), ranks),
        troubled=Anomalies(parts.folder.trouble, config, engine, workload, ranks, order, cutting, events.send),
        cut_smaller=cutting.cut_smaller,
        tokens=functools.partial(own_tokens, workload, engine.counts_samples),
        source=source_of(workload),
        rank=ranks.rank,
        world=ranks.world,
    )
    with parts.meters, checkpoints, cutting.bounding(), collecting(collect_every(config)) as collect:
        around = replace(around, after_step=collect)
        status = train(engine, cutting.windows(progress), config, total_steps, order.steps_per_epoch, progress, around)
    if evaluation is not None:
        evaluation.write_scores(ranks, parts.folder.scores)
    trained_nothing = resume and progress.step == first_step
    report = ranks.on_first(lambda: earlier_report(parts.folder, status, progress)) if trained_nothing else None
    closing = closing_lines(status, progress, checkpoints, trained_nothing)
    if report is None:
        report = report_of(parts, checkpoints, progress, status, order).model_copy(
            update={"network": network, "first_step": first_step, **effective(parts, progress.elapsed_seconds, before)}
        )
        ranks.on_first(lambda: report.write(parts.folder.report))
    events.send(RunFinished(status, progress.step, "\n".join(filter(None, (closing, report.chance)))))
    return report


def _save(parts: TrainingContext, checkpoints: RunCheckpoints, progress: Progress) -> None:
    """Saves. Raises RunError on all ranks if the run's folder is gone: a save would make a new one in its place."""
    parts.ranks.on_first(parts.events.check)
    checkpoints.save(progress)


def _send(parts: TrainingContext, event: Event) -> None:
    """Sends a point of the curve on all ranks together, which end alike if it cannot be written."""
    if isinstance(event, StepDone):
        parts.ranks.on_first(lambda: parts.events.send(event))
    else:
        parts.events.send(event)


def _scored(metrics: TextMetrics, ranks: Communicator, answers: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the metrics of answers, the same on all ranks."""
    return ranks.on_first(lambda: metrics.of(answers))
