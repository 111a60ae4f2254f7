"""A training on one page: config → workload → engine → loop → report."""

from __future__ import annotations

import functools
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from drivetrain.checkpoint.directory import clean_partials
from drivetrain.config.machine import Machine
from drivetrain.config.micro_batch_backoff import again
from drivetrain.config.run import RunConfig
from drivetrain.config.texts import texts
from drivetrain.data.loader import evaluation_batches
from drivetrain.data.order import Order
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.errors import problem
from drivetrain.generation.answering import sampler
from drivetrain.measure.meters import Meters
from drivetrain.measure.throughput import Stopwatch
from drivetrain.memory.garbage import collecting
from drivetrain.memory.shortage import room_for
from drivetrain.numerics.torch_precision import arithmetic, is_emulated
from drivetrain.runtime import environment
from drivetrain.runtime.attempt import Attempt
from drivetrain.runtime.hardware import torch_device
from drivetrain.runtime.heartbeat import Heart
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.runtime.signals import StopRequest, stop_on_signals
from drivetrain.tracking.build import EventStream, build_trackers
from drivetrain.tracking.events import Event, RunFinished, RunStarted, StepDone, Warned
from drivetrain.tracking.jsonl import FILE_NAME, odd_lines, read_events
from drivetrain.training import preflight
from drivetrain.training.anomalies import Anomalies, set_aside
from drivetrain.training.assemble import assemble
from drivetrain.training.auto_settings import chosen, collect_every, order_of, total_steps_of
from drivetrain.training.batching import Batching, check_shares
from drivetrain.training.loop import LoopHooks, Progress, train
from drivetrain.training.mixture_report import EvaluationBySet, cadence_notes, evaluation_cuts, mixture_report
from drivetrain.training.report import RunReport, Status
from drivetrain.training.run_checkpoints import RunCheckpoints
from drivetrain.training.workload_rules import best_metric
from drivetrain.workloads.base import Workload

INTERRUPTED_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@dataclass(frozen=True)
class TrainingContext:
    """The parts that a training is put together from."""

    config: RunConfig
    machine: Machine
    ranks: Communicator
    workload: Workload
    engine: Engine
    meters: Meters
    folder: RunFolder
    events: EventStream
    stop: StopRequest
    attempt: Attempt
    given: RunConfig  # before micro-batches were made smaller for want of memory

    @property
    def chosen(self) -> dict[str, Any]:
        return chosen(self.config, self.machine, self.workload, self.engine.compiled)


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
    with arithmetic(config.precision_spec, machine), stop_on_signals() as stop:
        ranks, stopwatch = Communicator(), Stopwatch(torch_device(machine), heart)
        given, config = config, _cut_as_fits(config, attempt, ranks)
        preflight.agree(config, ranks)
        with room_for("building the model"):
            workload, engine = assemble(config, machine, ranks, training=True, part=stopwatch.part)
        preflight.same_data(workload, ranks)
        folder = RunFolder(config.folder)
        # a rank on a machine that came late does not know that the run had begun
        resume = any(ranks.all_gather(resume or attempt.goes_on))
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
                TrainingContext(config, machine, ranks, workload, engine, meters, folder, events, stop, attempt, given),
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
    cutting = Batching(config, parts.machine, workload, engine, order, total_steps, events.send, parts.given)
    check_shares(order, cutting.slice, engine, ranks)
    metric = best_metric(config, workload)
    checkpoints = RunCheckpoints(parts.folder.checkpoints, config, engine, ranks, metric, workload.train, events.send)
    progress = checkpoints.restore() if resume else Progress()
    if resume and progress.step == 0:
        ranks.on_first(lambda: _refuse_lost(parts.folder))
    _refuse_beyond(config, total_steps, progress)
    started = progress.step
    former = ranks.on_first(lambda: _begun(parts, progress.step))
    if former:
        events.send(Warned(message=f"of steps that are made again: {parts.folder.trouble} keeps {', '.join(former)}"))
    before = parts.attempt.elapsed_before(progress.elapsed_seconds)
    network = preflight.timed_all_reduce(ranks, torch_device(parts.machine))
    events.send(_started(parts, total_steps, progress, order.num_samples))
    for message in cadence_notes(config, order):
        events.send(Warned(message=message))
    around = LoopHooks(
        evaluate=_evaluation(parts, order, progress) if workload.evaluation is not None else None,
        save=functools.partial(_save, parts, checkpoints),
        send=functools.partial(_send, parts),
        stop=lambda: ranks.any_asked(parts.stop.signal_number is not None),
        best_metric=metric,
        meters=parts.meters,
        generate=sampler(engine, workload, ranks, config.evaluation_batch),
        troubled=Anomalies(parts.folder.trouble, config, engine, workload, ranks, order, cutting, events.send),
        cut_smaller=cutting.cut_smaller,
    )
    with parts.meters, checkpoints, collecting(collect_every(config)) as collect:
        around = replace(around, after_step=collect)
        status = train(engine, cutting.windows(progress), config, total_steps, order.steps_per_epoch, progress, around)
    trained_nothing = resume and progress.step == started
    report = ranks.on_first(lambda: _reported(parts.folder, status, progress)) if trained_nothing else None
    closing = _closing(status, progress, checkpoints, trained_nothing)
    if report is None:
        report = _report(parts, checkpoints, progress, status, order).model_copy(
            update={"network": network, **_effective(parts, progress.elapsed_seconds, before)}
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


def _refuse_beyond(config: RunConfig, total_steps: int, progress: Progress) -> None:
    """Raises UserError for a run that is past the requested end: to print its old report would pass for a result."""
    if progress.step > total_steps:
        field = "loop.steps" if config.loop.steps is not None else "loop.epochs"
        why = f"the run is at step {progress.step} already, beyond {total_steps}: nothing was trained"
        raise problem(field, why, f"give more than {progress.step} steps, or start anew with --overwrite")


def _refuse_lost(folder: RunFolder) -> None:
    """Refuses a fresh start that would cut the curve of a run whose checkpoints are on a missing disk."""
    file = folder.path / FILE_NAME
    events = read_events(file, lambda _: None) if file.exists() else ()  # its odd lines are in the record
    saved = [event["step"] for event in events if event["event"] == "checkpoint"]
    if saved:
        why = f"the last checkpoint was of step {max(saved)}, and {folder.checkpoints} holds none now"
        raise problem("--resume", why, "put them back (is a disk away?), or start anew with --overwrite")


def _reported(folder: RunFolder, status: Status, progress: Progress) -> RunReport | None:
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


def _begun(parts: TrainingContext, step: int) -> list[str]:
    """Writes run.yaml and environment.json: no check refuses the run now. Returns trouble folders set aside."""
    parts.folder.describe(parts.config, environment.describe(parts.machine))
    parts.folder.begun()
    return set_aside(parts.folder.trouble, step)


def evaluate(config: RunConfig, workload: Workload, engine: Engine, part: range | None = None) -> dict[str, float]:
    """Returns loss and metrics over the evaluation data, or a part of them, every sample once."""
    assert workload.evaluation is not None
    batches = evaluation_batches(
        workload.evaluation,
        workload.collate,
        config.evaluation_batch,
        config.loader,
        engine.data_rank,
        engine.data_world,
        evaluation_cuts(workload, config.evaluation_batch, part),
    )
    values = engine.evaluate(batches, workload.metrics())
    return {**values, **workload.derived(values)}


def _evaluation(parts: TrainingContext, order: Order, progress: Progress) -> Callable[[], dict[str, float]]:
    own = functools.partial(evaluate, parts.config, parts.workload, parts.engine)
    return EvaluationBySet(own, parts.workload, order, progress, parts.config.evaluation.by_set, parts.events.send)


def _started(parts: TrainingContext, total_steps: int, progress: Progress, epoch_samples: int | None) -> RunStarted:
    config, workload = parts.config, parts.workload
    engaged = {name: value for name, value in asdict(parts.engine.engaged()).items() if value is not False}
    facts = {"precision": config.precision, "engine": config.engine.label, **engaged, **parts.chosen, **workload.facts}
    return RunStarted(
        name=config.name,
        output=str(parts.folder.path),
        total_steps=total_steps,
        first_step=progress.step,
        samples_per_epoch=epoch_samples,
        facts=facts,
    )


def _closing(status: Status, progress: Progress, checkpoints: RunCheckpoints, trained_nothing: bool) -> str:
    """Returns the lines that the run prints last."""
    saved, at = checkpoints.newest(), f"at step {progress.step}"
    if progress.skipped:
        at += f" ({progress.skipped} skipped, so {progress.updates} updates)"
    if status == "interrupted":
        return f"interrupted and saved {at} in {saved}; go on with --resume"
    why = f", {progress.evaluations_without_gain} evaluations without a gain" if status == "stopped_early" else ""
    told = f"{status.replace('_', ' ')} {at}{why}; newest checkpoint {saved}"
    if not trained_nothing:
        return told
    more = "a larger evaluation.early_stopping.patience" if status == "stopped_early" else "a longer loop"
    return f"{told}; nothing was left to train: {more} goes on"


def _report(
    parts: TrainingContext, checkpoints: RunCheckpoints, progress: Progress, status: Status, order: Order
) -> RunReport:
    config, machine = parts.config, parts.machine
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
        best=progress.best,
        terms=progress.terms,
        seconds=progress.elapsed_seconds,
        data=parts.workload.facts,
        checkpoint=str(newest) if newest else None,
        best_checkpoint=str(best) if best else None,
        versions=environment.versions(),
        **measured(parts.meters, parts.engine, parts.ranks),
    )


def _effective(parts: TrainingContext, elapsed_seconds: float, before: float) -> dict[str, Any]:
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
    for shown, told in zip(summary["ranks"], ranks.all_gather(own), strict=True):
        shown.update(told)
    return summary
