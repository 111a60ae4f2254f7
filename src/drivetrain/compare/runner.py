"""Runs the cells and reports how each ended: one after another here, or at once where a place has the devices."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from drivetrain.compare.cell import REQUEST, OnRay, Request
from drivetrain.compare.cell_process import CellProcess, Glance, Limits
from drivetrain.compare.matrix import Cell, Job, Matrix
from drivetrain.compare.outcome import Outcome
from drivetrain.errors import problem


class Listener(Protocol):
    """Receives events as the matrix fills."""

    def started(self, cell: Cell) -> None: ...

    def glanced(self, cell: Cell, glance: Glance) -> None: ...

    def lost(self, cell: Cell, why: str) -> None:
        """Called when the machine of a running cell was lost, and the cell is to be started again."""

    def ended(self, cell: Cell, outcome: Outcome, kept: bool) -> None:
        """Called when a cell has ended. kept: its result is from an earlier start."""


class Again(Enum):
    """Selects which cells of an earlier start are run again."""

    UNFINISHED = "unfinished"
    FAILED = "failed"  # and those that did not complete
    ALL = "all"


class Place(Protocol):
    """Where cells run, when not one after another on this machine."""

    def run(self, cells: list[Cell], job: Job, limits: Limits, listener: Listener) -> dict[str, Outcome]:
        """Runs cells of different keys, and returns how each ended, by its key, as it is in the cell's folder too."""


def run_matrix(
    matrix: Matrix, root: Path, limits: Limits, again: Again, listener: Listener, place: Place | None = None
) -> list[Outcome]:
    """Returns outcomes in the order of the cells. Cells of one key are one run, which is made once.

    place: None runs them one after another on this machine. KeyboardInterrupt ends the running cells and is passed on;
    finished ones stay.
    """
    with _alone(root):
        if place is not None:
            return _at_once(matrix, limits, again, listener, place)
        outcomes: list[Outcome] = []
        done: set[str] = set()
        for cell in matrix.cells:
            outcomes.append(_one(cell, matrix.job, limits, Again.UNFINISHED if cell.key in done else again, listener))
            done.add(cell.key)
        return outcomes


def _at_once(matrix: Matrix, limits: Limits, again: Again, listener: Listener, place: Place) -> list[Outcome]:
    found: dict[int, Outcome] = {}
    first: dict[str, Cell] = {}
    for number, cell in enumerate(matrix.cells):
        known = _known(cell, again)
        if known is not None:
            found[number] = known
            listener.ended(cell, known, kept=bool(known.key))
        else:
            first.setdefault(cell.key, cell)
    made = place.run([*first.values()], matrix.job, limits, listener)
    for number, cell in enumerate(matrix.cells):
        if number not in found:
            found[number] = made[cell.key]
            if first[cell.key] is not cell:
                listener.ended(cell, made[cell.key], kept=True)
    return [found[number] for number in range(len(matrix.cells))]


def _one(cell: Cell, job: Job, limits: Limits, again: Again, listener: Listener) -> Outcome:
    known = _known(cell, again)
    if known is not None:
        listener.ended(cell, known, kept=bool(known.key))
        return known
    listener.started(cell)
    prepare(cell, job)
    process = CellProcess(cell.folder, cell.key, limits)
    outcome = process.run(lambda glance: listener.glanced(cell, glance))
    listener.ended(cell, outcome, kept=False)
    return outcome


def _known(cell: Cell, again: Again) -> Outcome | None:
    """Returns the outcome of a cell that need not run: a rule refuses it, or an earlier start has ended it."""
    if cell.run is None:
        reason = "; ".join(f"{found.field}: {found.why}" for found in cell.problems)
        return Outcome(key="", status="refused", reason=reason)
    earlier = None if again is Again.ALL else Outcome.read(cell.folder)
    if earlier is not None and earlier.key == cell.key and (again is not Again.FAILED or earlier.status == "completed"):
        return earlier
    return None


def prepare(cell: Cell, job: Job, on_ray: OnRay | None = None) -> None:
    """Empties a cell's folder and writes its request into it. on_ray: as Request has it."""
    assert cell.run is not None, "a refused cell has no process"
    shutil.rmtree(cell.folder, ignore_errors=True)
    cell.folder.mkdir(parents=True)
    request = Request(
        key=cell.key, verb=job.verb, run=cell.run, checkpoint=job.checkpoint, plan=job.plan, on_ray=on_ray
    )
    (cell.folder / REQUEST).write_text(request.model_dump_json(indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Raises UserError if another comparison works in the folder. The lock ends with the process."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise problem("--output", f"another comparison is running in {root}", "wait for it, or give another") from None
    except OSError as error:
        raise problem("--output", f"{root} cannot be written: {error.strerror}", "give another folder") from None
    try:
        yield
    finally:
        lock.release()
