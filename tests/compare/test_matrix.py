"""Cells: which run each is, and when a result still counts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from drivetrain.compare.matrix import Cell, Job, Matrix, build_matrix
from drivetrain.compare.outcome import Outcome, Status
from drivetrain.config.axes import read_axes
from drivetrain.config.machine import Machine
from drivetrain.errors import UserError

CPU = Machine("cpu", "a CPU", 1, 2**33, 2, None, frozenset({"float32"}))
RUN = """
workload:
  type: text_classification
  model: {tokenizer: vocab.txt, config: {model_type: bert}}
  data: {train: reviews.csv}
batch_size: 4
loop: {steps: 1}
seed: 7
"""
TRAIN = Job("train", None)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    Path("reviews.csv").write_text("text,label\na,1\n")


def matrix(*arguments: str, seeds: int = 1, job: Job = TRAIN, machine: Machine = CPU, torch: str = "2.13") -> Matrix:
    fixed, axes = read_axes(arguments)
    return build_matrix(Path("run.yaml"), fixed, axes, seeds, job, Path("out"), machine, {"torch": torch})


def test_every_combination_runs_at_every_seed_and_all_of_one_seed_come_first() -> None:
    found = matrix("precision=fp32,bf16", "batch_size=1,2", seeds=2)
    runs = [cell.run for cell in found.cells]
    assert [(run.seed, run.precision, run.batch_size) for run in runs if run is not None] == [
        (seed, precision, batch) for seed in (7, 8) for precision in ("fp32", "bf16") for batch in (1, 2)
    ]
    assert len({cell.folder for cell in found.cells}) == len({cell.key for cell in found.cells}) == 8
    assert all(
        run is not None and run.output == cell.folder / "run" for run, cell in zip(runs, found.cells, strict=True)
    )


def test_seeds_are_counted_or_are_an_axis_but_not_both() -> None:
    assert [cell.run.seed for cell in matrix("seed=1,2").cells if cell.run is not None] == [1, 2]
    with pytest.raises(UserError, match="--seeds: seed is an axis already"):
        matrix("seed=1,2", seeds=2)


def test_a_cell_that_cannot_work_keeps_its_problems() -> None:
    good, refused, unknown = matrix("precision=fp32,tf32,fp17").cells
    assert good.run is not None
    assert (refused.run, unknown.run) == (None, None)
    assert "exists on cuda only" in refused.problems[0].why
    assert "fp17" in unknown.problems[0].why


def weights(folder: str, manifest: str = "{}") -> str:
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / "manifest.json").write_text(manifest)
    return folder


@pytest.mark.parametrize(
    ("job", "said"),
    [(Job("predict", "runs"), "runs is no checkpoint"), (Job("train", "step-1"), "only predictions start from one")],
)
def test_a_checkpoint_that_no_cell_could_use_is_reported_before_any_starts(job: Job, said: str) -> None:
    with pytest.raises(UserError, match=f"--checkpoint: {said}"):
        matrix(job=job)


def test_what_makes_a_result_makes_its_key() -> None:
    (cell,) = matrix().cells
    same = [matrix("tracking.log_every=3"), matrix("name=other")]
    assert {found.cells[0].key for found in same} == {cell.key}
    others = [
        matrix("lr=0.5"),
        matrix("seed=8"),
        matrix(job=Job("predict", None)),
        matrix(job=Job("predict", weights("step-1"))),
        matrix(job=Job("predict", weights("step-1", "trained anew"))),
        matrix(torch="2.14"),
        matrix(machine=replace(CPU, device_name="another CPU")),
    ]
    Path("reviews.csv").write_text("text,label\na,1\nb,0\n")
    others.append(matrix())
    Path("mine.py").write_text("a = 1")
    own = ["workload={type: module, path: mine.py}"]
    others.append(matrix(*own))
    Path("mine.py").write_text("a = 2")
    os.utime("mine.py", (0, 0))
    others.append(matrix(*own))
    keys = [found.cells[0].key for found in others]
    assert len({cell.key, *keys}) == 1 + len(others)


def measured(cell: Cell, status: Status = "completed") -> None:
    cell.folder.mkdir(parents=True, exist_ok=True)
    Outcome(key=cell.key, status=status).write(cell.folder)


def test_a_cell_is_found_again_whatever_axes_lead_to_it() -> None:
    first = {cell.choice.values: cell for cell in matrix("batch_size=1,2", "precision=fp32,bf16").cells}
    assert first["2", "bf16"].folder.name.startswith("2-bf16-7-")
    for cell in first.values():
        measured(cell)
    for arguments in (["precision=fp32,bf16", "batch_size=2"], ["batch_size=1,2", "precision=bf16"], ["lr=1e-3,1"]):
        for cell in matrix(*arguments).cells:
            same = [found for found in first.values() if found.key == cell.key]
            assert [found.folder for found in same] == [cell.folder] * len(same)
            assert cell.run is not None
            assert cell.run.output == cell.run_folder == cell.folder / "run"
    assert matrix("precision=bf16", "batch_size=2").cells[0].folder == first["2", "bf16"].folder
    assert matrix("precision=bf16", "batch_size=2", torch="2.14").cells[0].folder != first["2", "bf16"].folder


def test_of_cells_of_one_key_the_completed_one_is_taken_and_one_is_made() -> None:
    """Two folders are left by versions that made one for each label; two values may mean the same run."""
    (cell,) = matrix().cells
    for name, status in (("a", "failed"), ("b", "completed"), ("c", "crashed")):
        measured(replace(cell, folder=Path("out/cells") / name), cast(Status, status))
    assert matrix().cells[0].folder == Path("out/cells/b")
    one, other, third = matrix("lr=0.5,5e-1,1").cells
    assert one.folder == other.folder != third.folder


def test_too_many_cells_are_a_slip_of_the_keyboard() -> None:
    many = ",".join(map(str, range(1, 101)))
    with pytest.raises(UserError, match="10,000 cells"):
        matrix(f"batch_size={many}", f"steps={many}")


@pytest.mark.parametrize("value", ["[1, 2],[3]", "{a: 1},{b: /etc}", "../x,y"])
def test_whatever_the_values_hold_a_cells_folder_lies_in_the_comparisons(value: str) -> None:
    for cell in matrix(f"config.depths={value}").cells:
        assert cell.folder.parent == Path("out/cells")
        assert cell.folder.name not in {"", ".", ".."}
