"""The beginning of a training: refuses what would lose a curve or train nothing, and records what is trained here."""

from __future__ import annotations

from dataclasses import asdict

from drivetrain.config.run import RunConfig
from drivetrain.errors import problem
from drivetrain.runtime import environment
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.tracking.events import RunStarted
from drivetrain.tracking.jsonl import FILE_NAME, read_events
from drivetrain.training.anomalies import set_aside
from drivetrain.training.context import TrainingContext
from drivetrain.training.progress import Progress


def refuse_beyond(config: RunConfig, total_steps: int, progress: Progress) -> None:
    """Raises UserError for a run that is past the requested end: to print its old report would pass for a result."""
    if progress.step > total_steps:
        field = "loop.steps" if config.loop.steps is not None else "loop.epochs"
        why = f"the run is at step {progress.step} already, beyond {total_steps}: nothing was trained"
        raise problem(field, why, f"give more than {progress.step} steps, or start anew with --overwrite")


def refuse_lost(folder: RunFolder) -> None:
    """Refuses a fresh start that would cut the curve of a run whose checkpoints are on a missing disk."""
    file = folder.path / FILE_NAME
    events = read_events(file, lambda _: None) if file.exists() else ()  # its odd lines are in the record
    saved = [event["step"] for event in events if event["event"] == "checkpoint"]
    if saved:
        why = f"the last checkpoint was of step {max(saved)}, and {folder.checkpoints} holds none now"
        raise problem("--resume", why, "put them back (is a disk away?), or start anew with --overwrite")


def begun(parts: TrainingContext, step: int) -> list[str]:
    """Writes run.yaml and environment.json: no check refuses the run now. Returns trouble folders set aside."""
    parts.folder.describe(parts.config, environment.describe(parts.machine))
    parts.folder.begun()
    return set_aside(parts.folder.trouble, step)


def started_event(
    parts: TrainingContext, total_steps: int, progress: Progress, epoch_samples: int | None
) -> RunStarted:
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
