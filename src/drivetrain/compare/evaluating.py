"""Evaluates several models on several data sets: what was asked for, checked as a whole, then one after another."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.config.files import path_exists, usable_path
from drivetrain.errors import Problem, RunError, UserError, problem
from drivetrain.launch.external_launcher import OuterLauncher
from drivetrain.launch.job import Result
from drivetrain.launch.prepare import Checked, checked_place
from drivetrain.runtime.run_folder import run_around

if TYPE_CHECKING:
    from drivetrain.compare.evaluations import Evaluation

EVALUATION = "workload.data.evaluation"
Start = Callable[[Checked, str, Path], Result]  # of a run, a checkpoint, and the file that takes the scores


@dataclass(frozen=True)
class Asked:
    """One evaluation. data: None for the run's own."""

    label: str
    ready: Checked
    checkpoint: str
    data: str | None


def places_and_overrides(given: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Returns the places, and the overrides, which have a = and are no file. Raises UserError without a place."""
    overrides = [text for text in given if "=" in text and not path_exists(text)]
    places = [usable_path(text) for text in given if text not in overrides]
    if not places:
        raise problem("RUN", "only overrides were given", "give a run file, or the folder of a run or checkpoint")
    return places, overrides


def asked(
    places: Sequence[Path], overrides: Sequence[str], checkpoints: Sequence[str], data: Sequence[str], trust: bool
) -> list[Asked]:
    """Returns the evaluations, data set by data set. Raises UserError with the problems of all of them.

    places: run files, folders of runs, and folders of checkpoints. checkpoints: of the runs; the best where none is
    named. data: files that stand in place of the runs' own evaluation data.
    """
    found, problems = list[Asked](), list[Problem]()
    sets: list[str | None] = [*data] if data else [None]
    for one in sets:
        given = [*overrides, *([] if one is None else [f"{EVALUATION}={json.dumps(one)}"])]
        for label, place, checkpoint in models_of(places, checkpoints):
            try:
                ready = checked_place(place, given, checkpoint=checkpoint, trust=trust)
            except UserError as error:
                problems += [located(label, each if one is None else _of_option(each, one)) for each in error.problems]
            else:
                found.append(Asked(label, ready, checkpoint, one))
    outer = OuterLauncher.here()
    if outer is not None and outer.world_size > 1 and len(found) > 1:
        why = f"{len(found)} were asked for, and another launcher started these {outer.world_size} processes for one"
        problems.append(Problem("RUN", why, "start drivetrain evaluate without it, or evaluate one at a time"))
    if problems:
        raise UserError(list(dict.fromkeys(problems)))
    return found


def _of_option(found: Problem, data: str) -> Problem:
    """Returns a problem with the field that --data sets as one with --data, unless it names the data already."""
    if found.field == EVALUATION.rpartition(".")[0]:  # a block that only this field was put into
        return Problem(f"--data {data}", "the run's workload takes no data by their path", "leave it out")
    if found.field == EVALUATION and data not in found.why:
        return Problem(f"--data {data}", found.why, found.fix)
    return found


def located(label: str, found: Problem) -> Problem:
    """Returns a problem with the model that has it; one with the model's folder names it already."""
    return found if found.field == label else Problem(f"{label}: {found.field}", found.why, found.fix)


def models_of(places: Sequence[Path], named: Sequence[str]) -> Iterator[tuple[str, Path, str]]:
    """Yields (label, run's folder or file, checkpoint). named: checkpoints; the best where none is."""
    checkpoints = named or ["best"]
    folder = next((each for each in checkpoints if each not in ("best", "last")), None)
    if folder is not None and len(places) > 1:
        why = (
            f"{folder} is one checkpoint, and {len(places)} models were given: each would be evaluated with its weights"
        )
        raise problem("--checkpoint", why, "give the checkpoint's folder in place of its run, or evaluate one run")
    for place in places:
        if (run := run_around(place)) is not None:
            if named:
                why = f"{place} is a checkpoint itself, beside --checkpoint {named[0]}"
                raise problem("--checkpoint", why, "give the run's folder, or leave --checkpoint out")
            yield str(place), run.path, str(place)
        else:
            for checkpoint in checkpoints:
                yield (str(place) if len(checkpoints) == 1 else f"{place} {checkpoint}"), place, checkpoint


def evaluations(wanted: Sequence[Asked], start: Start) -> Iterator[Evaluation]:
    """Yields each evaluation as it is done; one that fails has its reason. Of other processes than the first, none."""
    # they import torch: a place that is not there is refused before
    from drivetrain.compare.evaluations import Evaluation
    from drivetrain.compare.scores import read_scores

    with tempfile.TemporaryDirectory(prefix="drivetrain-evaluate-") as folder:
        for number, each in enumerate(wanted):
            file = Path(folder) / f"{number}.npz"
            try:
                result = start(each.ready, each.checkpoint, file)
            except (UserError, RunError) as error:
                if len(wanted) == 1:
                    raise
                yield Evaluation(each.label, each.data, None, {}, str(error))
                continue
            if result.of_first:
                named = result.value["metrics"]
                scores = {name: kept for name in named if (kept := read_scores(file, name)) is not None}
                yield Evaluation(each.label, each.data, result.value, scores)
