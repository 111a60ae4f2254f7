"""Finds the number for `micro_batch_size: auto` before a training starts, by processes that may run out of memory."""

from __future__ import annotations

from pathlib import Path

from drivetrain.config.load import load
from drivetrain.config.run import RunConfig
from drivetrain.errors import OutOfMemory
from drivetrain.launch.elastic import Died, Hung, one_attempt
from drivetrain.launch.job import Job
from drivetrain.launch.rank import TASK
from drivetrain.launch.rendezvous import Meeting
from drivetrain.runtime.atomic_file import writing
from drivetrain.runtime.attempt import Attempt
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.training.batch_size_trials import Tried, sizes


def fitted(task: Job, folder: Path, meeting: Meeting) -> Job:
    """Returns the task with the largest size that fits. Raises OutOfMemory if not even one sample does."""
    known = number_of_before(task)
    if known is not None and task.verb == "train":
        notice = f"micro_batch_size is {known}, as the run in the folder has it: --overwrite looks for it anew"
        return _with(task, known).model_copy(update={"notices": [*task.notices, notice]})
    if known is not None or task.verb not in ("train", "trace", "profile"):
        return _with(task, known)
    search = task.model_copy(update={"verb": "fit"})
    with writing(folder, then="start again"):
        (folder / TASK).write_text(search.model_dump_json(), encoding="utf-8")
        Attempt(folder=folder).write()
    possible = sizes(task.run)
    if task.planned is not None:
        Tried(planned=task.planned.micro_batch_size).write(folder)
    while Tried.read(folder).next(possible) is not None:
        try:
            one_attempt(search, folder, meeting, task.run.processes or 1)
        except (OutOfMemory, Died) as error:
            tried = Tried.read(folder)
            # it came before, says nothing of memory, or nothing smaller is left
            if tried.trying is None or isinstance(error, Hung) or tried.trying == tried.possible(possible)[0]:
                meeting.give_up()
                raise
            tried.fails, tried.trying = tried.trying, None
            tried.write(folder)
        except BaseException:
            meeting.give_up()
            raise
        meeting.part()
    tried = Tried.read(folder)
    fit = f"{', '.join(map(str, tried.fit))} fit{'s' if len(tried.fit) == 1 else ''}"
    but = "" if tried.fails is None else f", {tried.fails} does not"
    notice = f"micro_batch_size is {tried.largest}: of the longest samples {fit}{but}"
    return _with(task, tried.largest).model_copy(update={"notices": [*task.notices, notice]})


def number_of_before(task: Job) -> int | None:
    """Returns the number of a run in the folder, if nothing has changed that it depends on."""
    file = RunFolder(task.run.folder).run_file
    if (task.verb == "train" and not task.resume) or not file.is_file():
        return None
    before, problems = load(file)
    if before is None or problems:
        return None
    deciding = RunConfig.deciding_memory() if task.verb == "train" else ()
    same = all(getattr(before, name) == getattr(task.run, name) for name in deciding)
    return before.micro_batch_limit if same else None


def _with(task: Job, size: int | None) -> Job:
    return task.model_copy(update={"run": task.run.model_copy(update={"micro_batch_size": size})})
