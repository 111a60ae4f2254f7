"""Turns run file and options into a run that can start here, or every problem at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drivetrain.config import rules
from drivetrain.config.load import load, replaced
from drivetrain.config.machine import Machine
from drivetrain.config.notices import notices
from drivetrain.config.planned import PlannedFigures
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem, UserError, problem, together
from drivetrain.launch.external_launcher import OuterLauncher, accelerate_problems
from drivetrain.launch.job import Node
from drivetrain.memory.garbage import importing
from drivetrain.objects import held
from drivetrain.runtime.checkpoint_names import check_there
from drivetrain.runtime.run_folder import RunFolder, refuse_code_of_folders


@dataclass(frozen=True)
class Checked:
    run: RunConfig
    notices: list[str]
    is_first: bool  # False: another process, started by another launcher, tells the result
    planned: PlannedFigures | None = None  # where a plan decided


def checked(
    run_file: Path,
    overrides: Sequence[str] = (),
    nodes: int | None = None,
    node: Node | None = None,
    checkpoint: str | None = None,
    data: str | None = None,
    output: Path | None = None,
    trust: bool = False,
    model_files: bool = True,
    anew: bool = False,
) -> Checked:
    """Reads and checks a run file. Raises UserError with the problems of schema and rules, and for a missing
    checkpoint.

    nodes: in place of the run file's. checkpoint: the one to load: best, last or a folder. data, output: of
    predictions. trust: whether Python runs that a run's own run.yaml names. model_files: whether problems that the
    model's files show are raised too. anew: whether the run begins, so that a plan decides what is `auto`, and not the
    run in the folder.
    """
    from drivetrain.launch.auto_choice import decided

    choice = decided(run_file, [*overrides, *([] if nodes is None else [f"nodes={nodes}"])], anew, trust)
    run, problems = load(run_file, choice.overrides)
    if run is not None:
        refuse_code_of_folders(run, run_file, trust)
    ready = judged_here(run, problems, node, checkpoint, data, output, model_files)
    all_notices = [*choice.notices, *replaced(run_file, choice.overrides), *ready.notices]
    return replace(ready, notices=all_notices, planned=choice.planned)


def checked_place(place: Path, overrides: Sequence[str] = (), **given: Any) -> Checked:
    """Does the same for a run file or the folder of a run. given: as `checked` takes."""
    return checked(*run_file_of(place, overrides), **given)


def run_file_of(place: Path, overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """Returns the run file of a run's folder, and the overrides that find its checkpoints where the folder lies now; a
    file as it is. Raises UserError for a folder without a run."""
    if not place.is_dir():
        return place, list(overrides)
    folder = RunFolder(place)
    if not folder.run_file.is_file():
        fix = "give a run file, or the folder of a run (runs/NAME)"
        raise problem(str(place), f"holds no run: it has no {folder.run_file.name}", fix)
    return folder.run_file, [f"output={json.dumps(str(place), ensure_ascii=False)}", *overrides]


def judged_here(
    run: RunConfig | None,
    problems: list[Problem],
    node: Node | None = None,
    checkpoint: str | None = None,
    data: str | None = None,
    output: Path | None = None,
    model_files: bool = True,
) -> Checked:
    """Returns the run as it starts on this machine, from the result of a run file's reader. Raises UserError with all
    problems."""
    if run is not None and (absent := _absent(run, checkpoint, data)):  # before torch is imported
        raise UserError([*problems, *absent])
    found = judged(run, problems, node or Node(), model_files)
    run = found.run
    if found.problems:
        raise UserError(found.problems)
    if output is not None:
        from drivetrain.inference.prediction_file import check_place

        check_place(output, run, data)
    return Checked(run, notices(run, found.machine), found.is_first)


def _absent(run: RunConfig, checkpoint: str | None, data: str | None) -> list[Problem]:
    """Returns the problems of a checkpoint, and of data to predict for, that are not there."""
    from drivetrain.data.rows import refuse_absent

    calls: list[Callable[[], None]] = []
    if checkpoint is not None:
        calls.append(lambda: check_there(checkpoint, RunFolder(run.folder).checkpoints, "--checkpoint"))
    if data is not None:
        calls.append(lambda: refuse_absent(data, "--data"))
    try:
        together(calls)
    except UserError as error:
        return list(error.problems)
    return []


@dataclass(frozen=True)
class Judged:
    """A run with its open fields filled in for this machine, and every problem that schema, rules and the model's small
    files show. is_first: as in Checked."""

    run: RunConfig
    machine: Machine
    problems: list[Problem]
    is_first: bool


def judged(run: RunConfig | None, problems: list[Problem], node: Node | None, model_files: bool = True) -> Judged:
    """Applies the rules of this machine. Raises UserError where too much is wrong for any run to be judged.

    node: this machine's place among the run's; None: not asked yet.
    """
    if run is None:
        raise UserError(problems)
    if run.workload.needs_objects and not held.held():
        raise held.missing()
    with importing():  # only now: a broken run file is answered without importing torch
        from drivetrain.runtime.hardware import detect

    machine = detect(run.device)
    problems = [*problems, *accelerate_problems(run)]
    outer = OuterLauncher.here()
    if outer is not None:
        machine = outer.machine(machine)
        run, found = outer.fitted(run)
        problems += found
    run, problems = rules.judged(run, problems, machine)
    if model_files:
        problems += run.workload.file_problems()
    if outer is None and node is not None:
        problems += _of_the_nodes(run, node)
    return Judged(run, machine, problems, outer is None or outer.rank == 0)


def _of_the_nodes(run: RunConfig, node: Node) -> list[Problem]:
    if run.nodes > 1 and node.rendezvous is None:
        why = f"is required with {run.nodes} nodes"
        return [Problem("--rendezvous", why, "give host:port of the first node, the same on each")]
    if node.rank >= run.nodes:
        return [Problem("--node-rank", f"{node.rank} was given, with {run.nodes} node(s)", "count from 0")]
    return []
