"""Tests what is seen of a matrix that fills: a line a cell in a log, a table on a terminal."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from drivetrain.compare.cell_process import Glance
from drivetrain.compare.live import MatrixView, _progress
from drivetrain.compare.matrix import Matrix
from drivetrain.compare.outcome import Outcome
from drivetrain.tracking.events import StepDone
from drivetrain.tracking.jsonl import JsonlTracker
from tests.compare.test_matrix import RUN
from tests.compare.test_matrix import matrix as matrix_of

GLANCE = Glance(seconds=12.0, resident_bytes=3 * 2**20, utilisation=0.5)


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Matrix:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    Path("reviews.csv").write_text("text,label\na,1\n")
    return matrix_of("precision=fp32,tf32")


def seen(matrix: Matrix, terminal: bool) -> str:
    """The text that a first cell that completes and a second one that is refused leave."""
    written = io.StringIO()
    first, second = matrix.cells
    with MatrixView(matrix, Console(file=written, force_terminal=terminal, width=120, color_system=None)) as view:
        view.started(first)
        view.glanced(first, GLANCE)
        view.ended(first, Outcome(key="a", status="completed", seconds=3.0), False)
        view.started(second)
        view.ended(second, Outcome(key="b", status="refused", reason="no [GPU]"), False)
    return written.getvalue()


def test_a_log_has_a_line_for_each_start_and_end_of_a_cell_and_none_for_a_glance(matrix: Matrix) -> None:
    assert seen(matrix, terminal=False).splitlines() == [
        "cell 1/2  fp32 (seed 7)",
        "cell 1/2  fp32 (seed 7): completed in 3.0 s",
        "cell 2/2  tf32",
        "cell 2/2  tf32: refused: no [GPU]",
    ]


@pytest.mark.parametrize("terminal", [False, True], ids=["log", "terminal"])
def test_a_field_that_an_override_replaces_is_noted_once_before_the_cells(matrix: Matrix, terminal: bool) -> None:
    text = seen(matrix_of("precision=fp32,tf32", "loop.epochs=2"), terminal)
    note = "note loop.epochs was given: it takes the place of the run file's loop.steps (1)"
    assert note in text.splitlines()[0]
    assert text.count(note) == 1
    assert "takes the place of" not in seen(matrix, terminal)


def test_a_terminal_shows_how_the_running_cell_does(matrix: Matrix) -> None:
    text = seen(matrix, terminal=True)
    assert "12 s  resident 3 MiB  processor 50%" in text
    assert "waiting" in text, "the second one, meanwhile"
    assert "1 of 2 cells: 1 completed" in text
    assert "2 of 2 cells: 1 completed, 1 refused" in text


def test_a_loss_that_is_not_finite_is_shown_and_ends_nothing(tmp_path: Path) -> None:
    JsonlTracker(tmp_path).handle(StepDone(3, 0.5, math.nan, math.inf, 1e-3, None, 0, 30, 5.0, 2.0))
    assert _progress(tmp_path) == "step 3  loss nan  5 samples/s"
