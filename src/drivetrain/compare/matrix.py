"""The cells of a comparison: a checked run each, its identity and its folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from drivetrain.checkpoint.directory import MANIFEST
from drivetrain.compare.outcome import Outcome
from drivetrain.config import rules
from drivetrain.config.axes import Axis, Choice, choices
from drivetrain.config.load import load, replaced
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem, problem

Verb = Literal["train", "predict"]
MOST_CELLS = 5000  # a matrix above is a slip of the keyboard


@dataclass(frozen=True)
class Job:
    """The job of every cell."""

    verb: Verb
    checkpoint: str | None  # to predict with; None: fresh weights
    plan: bool = False  # each training is planned first


@dataclass(frozen=True)
class Cell:
    """One run of the matrix. If it cannot work, `run` is None and `problems` has the reasons."""

    choice: Choice
    seed: int
    run: RunConfig | None
    problems: tuple[Problem, ...]
    folder: Path  # of the cell; the run's own folder lies in it
    key: str  # what makes its result: another key is another result

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"


@dataclass(frozen=True)
class Matrix:
    name: str
    job: Job
    axes: tuple[Axis, ...]
    cells: tuple[
        Cell, ...
    ]  # all choices with the first seed, then with the next: a drift of the machine hits all alike
    num_seeds: int
    notes: tuple[str, ...] = ()  # on how overrides were read


def build_matrix(
    run_file: Path,
    fixed: Sequence[str],
    axes: Sequence[Axis],
    num_seeds: int,
    job: Job,
    root: Path,
    machine: Machine,
    versions: dict[str, str],
) -> Matrix:
    """Returns every combination of the axes at seeds seed, seed + 1, ... of the run file. Raises UserError if there are
    too many."""
    chosen = list(choices(fixed, axes))
    if len(chosen) * num_seeds > MOST_CELLS:
        raise problem("axes", f"they make {len(chosen) * num_seeds:,} cells", f"give at most {MOST_CELLS:,}")
    if job.checkpoint is not None:
        _check_weights(job.verb, job.checkpoint)
    if job.plan and job.verb != "train":
        raise problem("--plan", "only trainings are planned", "leave it out, or compare trainings")
    if num_seeds > 1 and any(axis.key == "seed" for axis in axes):
        raise problem("--seeds", "seed is an axis already", "give one of the two")
    earlier = _earlier(root)
    cells = [
        _cell(run_file, choice, offset, job, root, machine, versions, earlier)
        for offset in range(num_seeds)
        for choice in chosen
    ]
    name = next((cell.run.name for cell in cells if cell.run is not None), run_file.stem)
    notes = dict.fromkeys(note for choice in chosen for note in replaced(run_file, choice.overrides))
    return Matrix(name, job, tuple(axes), tuple(cells), num_seeds, tuple(notes))


def _check_weights(verb: Verb, given: str) -> None:
    if verb != "predict":
        raise problem("--checkpoint", "only predictions start from one", "add --verb predict, or leave it out")
    if not (Path(given) / MANIFEST).is_file():
        fix = "give a folder such as runs/NAME/checkpoints/step-00000100"
        raise problem("--checkpoint", f"{given} is no checkpoint: it has no {MANIFEST}", fix)


def _earlier(root: Path) -> dict[str, Path]:
    """Returns key → folder of each cell that ended in an earlier start; of several the one that completed."""
    found: dict[str, Path] = {}
    for folder in sorted((root / "cells").iterdir()) if (root / "cells").is_dir() else ():
        outcome = Outcome.read(folder)
        if outcome is not None and (outcome.status == "completed" or outcome.key not in found):
            found[outcome.key] = folder
    return found


def _cell(
    run_file: Path,
    choice: Choice,
    offset: int,
    job: Job,
    root: Path,
    machine: Machine,
    versions: dict[str, str],
    folders: dict[str, Path],
) -> Cell:
    """Makes a cell. folders: by key, of cells that are known already, from any axes; this one is added."""
    run, problems = load(run_file, choice.overrides)
    if run is not None:
        run, problems = rules.judged(run, problems, machine)
    if run is None or problems:
        folder = root / "cells" / slug(f"{choice.label} refused")
        return Cell(choice, offset, None, tuple(problems), folder, key="")
    seeded = run.model_copy(update={"seed": run.seed + offset})
    key = _key(seeded, job, machine, versions)
    folder = folders.setdefault(key, root / "cells" / f"{slug(choice.label)}-{seeded.seed}-{key[:8]}")
    return Cell(
        choice, seeded.seed, seeded.model_copy(update={"output": folder / "run", "mirror": None}), (), folder, key
    )


def _key(run: RunConfig, job: Job, machine: Machine, versions: dict[str, str]) -> str:
    made_of: dict[str, Any] = run.model_dump(mode="json", exclude={"output", "mirror", "name", "tracking"})
    made_of |= {"job": asdict(job), "device": machine.device_name, "versions": versions, "files": _files(run, job)}
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def _files(run: RunConfig, job: Job) -> list[str]:
    """Returns the state of the files the run reads: a changed one makes another result. Contents of folders are not
    checked."""
    workload = run.workload
    weights = [] if job.checkpoint is None else [_hash(Path(job.checkpoint) / MANIFEST)]  # names all files of it
    code = [] if workload.code_file is None else [_hash(workload.code_file.path)]
    paths = [Path(path) for path, _ in workload.sources]
    state = [f"{path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths if path.is_file()]
    return [*code, *state, *weights]


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def slug(label: str) -> str:
    """Returns a folder's name: every unusual character becomes a hyphen."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.")[:60] or "cell"
