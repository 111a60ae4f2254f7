"""The work of one verb, as a value that travels to every rank, and its result. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from drivetrain.config.planned import PlannedFigures
from drivetrain.config.run import RunConfig

Verb = Literal["train", "evaluate", "predict", "time_predictions", "trace", "fit", "profile"]


class Job(BaseModel):
    model_config = ConfigDict(frozen=True)

    verb: Verb
    run: RunConfig
    notices: list[str] = []
    resume: bool = False
    overwrite: bool = False  # a run's folder, or what an interrupted prediction left
    quiet: bool = False
    checkpoint: str | None = None  # best, last or a folder
    data: str | None = None  # what to predict for
    texts: list[str] = []  # what to predict for in place of data
    output: Path | None = None  # where predictions or profiles go; None: the screen, and nowhere
    scores: Path | None = None  # where an evaluation writes what each sample added
    steps: int = 0  # of a trace or a profile
    evaluates: bool = True  # a trace, before its first step
    planned: PlannedFigures | None = None  # of a training whose engine or precision a plan decided
    objects: Path | None = None  # the folder of those that the run is made from, for ranks in processes of their own

    @property
    def max_restarts(self) -> int:
        return self.run.max_restarts if self.verb == "train" else 0


class Result(BaseModel):
    """The result of a job. code: the exit code. value: JSON-able, its meaning depends on the verb."""

    model_config = ConfigDict(frozen=True)

    code: int
    value: Any
    of_first: bool = True  # whether this is the first rank's, which is the one to tell


def lost(task: Job) -> str:
    """Returns the end of an error's message: the training that was lost because it could not be saved, or the
    predictions that are kept."""
    if task.verb == "predict" and task.output is not None:
        from drivetrain.inference.prediction_file import PredictionFile

        return PredictionFile(task.output, task.overwrite).left()
    if task.verb != "train":
        return ""
    from drivetrain.checkpoint.directory import steps
    from drivetrain.runtime.run_folder import RunFolder

    saved = steps(RunFolder(task.run.folder).checkpoints)
    if not saved:
        return " before anything was saved"
    return f"; what came after {saved[-1]} is lost, from which --resume goes on"


@dataclass(frozen=True)
class Node:
    """This machine among those of the run. rendezvous: host:port of the first one."""

    rank: int = 0
    rendezvous: str | None = None
