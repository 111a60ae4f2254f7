"""Python that a run names: refused where the run came in a folder, and the code lies outside the current one.

A run file that the user writes is trusted. The run.yaml that a training left in its folder may come from a stranger,
with that folder: the Python that it names runs only if it lies in the current folder and did not come with the run, or
with `--trust`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem, UserError
from drivetrain.objects import held
from drivetrain.trust.import_path import in_current_folder
from drivetrain.trust.remote_code import PERMISSIONS


@dataclass(frozen=True)
class NamedCode:
    """Python that a run names. place: None if no file or folder here is known to hold it."""

    field: str
    name: str
    place: Path | None


def refuse_named_code(run: RunConfig, came_with: Path, trusted: bool) -> None:
    """Raises UserError for all Python that a run would execute, unless it is trusted. came_with: the run's folder."""
    here, folder = Path.cwd().resolve(), came_with.resolve()
    problems = []
    for code in () if trusted else named_code(run):
        place = None if code.place is None else code.place.expanduser().resolve()
        if place is not None and place.is_relative_to(here) and not place.is_relative_to(folder):
            continue
        came = place is not None and place.is_relative_to(folder)
        where = "came with the folder" if came else f"lies outside the current folder, {here}"
        why = f"{came_with} names Python code, {code.name}, which {where}: it could do anything on this machine"
        problems.append(Problem(code.field, why, "read that code, and where you trust it give --trust"))
    if problems:
        raise UserError(problems)


def named_code(run: RunConfig) -> Iterator[NamedCode]:
    """Yields every place of a run from which Python other than this package's is executed."""
    file, model = run.workload.code_file, run.workload.described_model
    if file is not None:
        yield NamedCode("workload.path", str(file.path), file.path)
    for key, permission in PERMISSIONS.items():
        if getattr(model, permission, False):
            path = str(getattr(model, key))
            here = Path(path).expanduser()
            yield NamedCode(f"workload.model.{permission}", path, here if here.exists() else None)
    if run.workload.runs_answers:
        yield NamedCode("workload.reinforcement.allow_code", "what its model writes", None)
    paths = [("optimizer.name", run.optimizer.name), ("schedule.name", run.schedule.name)]
    paths += run.workload.named_functions
    paths += [("tracking.trackers", name) for name in run.tracking.trackers]
    paths += [("evaluation.generation", name) for name in run.evaluation.generation]
    for field, path in paths:
        if set(path) & set(".:") and not path.startswith(
            held.PREFIX
        ):  # an import path: other names are of this package's own tables
            yield NamedCode(field, path, _package(path))


def _package(path: str) -> Path | None:
    """Returns where the outermost package of an import path lies, found without importing it."""
    top = path.replace(":", ".").partition(".")[0]
    try:
        found = find_spec(top)
    except (ImportError, ValueError):
        return None
    if found is None:
        return in_current_folder(top)
    places = [found.origin] if found.has_location else list(found.submodule_search_locations or ())
    return Path(places[0]) if places and places[0] else None
