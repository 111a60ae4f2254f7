"""Cells on a place that runs several at once: which it gets, and what comes back in the matrix's order."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain.compare.cell import REQUEST, Request
from drivetrain.compare.cell_actor import CellActor, Seen
from drivetrain.compare.cell_process import Glance, Limits
from drivetrain.compare.matrix import Cell, Job, Matrix
from drivetrain.compare.outcome import Outcome
from drivetrain.compare.runner import Again, Listener, prepare, run_matrix
from tests.compare.test_matrix import RUN
from tests.compare.test_matrix import matrix as matrix_of


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Matrix:
    """fp32, tf32 (which a CPU refuses), and bf16; and fp32 once more."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    Path("reviews.csv").write_text("text,label\na,1\n")
    made = matrix_of("precision=fp32,tf32,bf16-mixed")
    return replace(made, cells=(*made.cells, replace(made.cells[0])))


class Heard:
    def __init__(self) -> None:
        self.events: list[str] = []

    def started(self, cell: Cell) -> None:
        self.events.append(f"{cell.choice.label} started")

    def glanced(self, cell: Cell, glance: Glance) -> None: ...

    def lost(self, cell: Cell, why: str) -> None: ...

    def ended(self, cell: Cell, outcome: Outcome, kept: bool) -> None:
        self.events.append(f"{cell.choice.label} {outcome.status}{' before' * kept}")


class Elsewhere:
    """A place that starts all cells, and ends the last one first."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def run(self, cells: list[Cell], job: Job, limits: Limits, listener: Listener) -> dict[str, Outcome]:
        del job, limits
        self.labels = [cell.choice.label for cell in cells]
        for cell in cells:
            listener.started(cell)
        found = {cell.key: Outcome(key=cell.key, status="completed", reason=cell.choice.label) for cell in cells}
        for cell in reversed(cells):
            cell.folder.mkdir(parents=True, exist_ok=True)
            found[cell.key].write(cell.folder)
            listener.ended(cell, found[cell.key], kept=False)
        return found


def test_a_place_gets_each_run_once_and_its_outcomes_come_back_in_the_order_of_the_cells(matrix: Matrix) -> None:
    place, heard = Elsewhere(), Heard()
    outcomes = run_matrix(matrix, Path("out"), Limits(), Again.UNFINISHED, heard, place)
    assert place.labels == ["fp32", "bf16-mixed"]
    assert [outcome.status for outcome in outcomes] == ["completed", "refused", "completed", "completed"]
    assert [outcome.reason for outcome in outcomes[2:]] == ["bf16-mixed", "fp32"]
    assert heard.events == [
        "tf32 refused",
        *("fp32 started", "bf16-mixed started", "bf16-mixed completed", "fp32 completed"),
        "fp32 completed before",
    ]


def test_what_an_earlier_start_has_ended_is_not_given_to_the_place(matrix: Matrix) -> None:
    for again, expected in ((Again.ALL, ["fp32", "bf16-mixed"]), (Again.UNFINISHED, []), (Again.FAILED, [])):
        place = Elsewhere()
        run_matrix(matrix, Path("out"), Limits(), again, Heard(), place)
        assert place.labels == expected
    cell = matrix.cells[2]
    Outcome(key=cell.key, status="crashed").write(cell.folder)
    place = Elsewhere()
    run_matrix(matrix, Path("out"), Limits(), Again.FAILED, Heard(), place)
    assert place.labels == ["bf16-mixed"]


def seen_at_the_end(actor: CellActor) -> Seen:
    deadline = time.monotonic() + 60
    while True:
        found = actor.look()
        if found.outcome is not None or found.failure is not None:
            return found
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_actor_runs_the_process_of_a_cell_in_the_callers_folder(matrix: Matrix, tmp_path: Path) -> None:
    cell = matrix.cells[0]
    prepare(cell, Job("predict", "nowhere"))
    actor = CellActor()
    actor.start(str(cell.folder.absolute()), cell.key, Limits(), str(tmp_path), False, 1)
    outcome = seen_at_the_end(actor).outcome
    assert outcome is not None
    assert outcome == Outcome.read(cell.folder)
    assert (outcome.key, outcome.status) == (cell.key, "refused"), "its data are one sample"
    assert outcome.foreign_share is not None
    assert Request.model_validate_json((cell.folder / REQUEST).read_bytes()).on_ray is None


def test_an_actor_that_does_not_see_the_folder_says_so(matrix: Matrix, tmp_path: Path) -> None:
    actor = CellActor()
    actor.start(str(tmp_path / "elsewhere"), matrix.cells[0].key, Limits(), str(tmp_path), False, 1)
    failure = seen_at_the_end(actor).failure
    assert failure is not None
    assert "all machines have to see it at this place" in failure


def test_an_ended_actor_leaves_no_process_and_no_outcome(matrix: Matrix, tmp_path: Path) -> None:
    cell = matrix.cells[0]
    prepare(cell, Job("train", None))
    actor = CellActor()
    actor.start(str(cell.folder.absolute()), cell.key, Limits(), str(tmp_path), False, 1)
    actor.end()
    assert actor.look().failure == "interrupted"
    assert Outcome.read(cell.folder) is None
