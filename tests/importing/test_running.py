"""Tests what was imported trains: two steps of the digits recipe under the imported engine, batch, optimizer and
schedule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.importing.made import FOLDER

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "digits.yaml"
SHORT = [
    *("loop.epochs=null", "loop.steps=2", "output=run", "checkpoints.every_steps=null"),
    *("evaluation.every_steps=null", "limit_train=64", "limit_evaluation=40"),
]


def test_a_pipe_gets_a_line_a_row_neither_padded_nor_wrapped(
    drivetrain: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [str(FOLDER / name) for name in ("llama_factory/llama_full_zero3.yaml", "accelerate/fsdp1_by_size.yaml")]
    for given, columns in ((files[:1], 4), (files[1:], 3)):  # the first one names another
        code, out, words = drivetrain("import", *given, "--onto", str(RECIPE), "--output", "new.yaml", "--overwrite")
        assert code == 0, words
        rows = [line.split("\t") for line in out.splitlines()]
        assert {len(row) for row in rows} == {columns}
        assert all(cell == cell.strip() and "  " not in cell and cell for row in rows for cell in row)
        assert max(map(len, out.splitlines())) > 80
        notes = {(row[-3], key) for row in rows for key in row[-2].split(", ")}
        assert ("mapped", "per_device_train_batch_size" if columns == 4 else "mixed_precision") in notes


@pytest.mark.parametrize(
    ("file", "engine", "precision", "batch"),
    [
        pytest.param("accelerate/fsdp1_by_size.yaml", "fsdp", "fp32", 64, marks=pytest.mark.slow),
        ("training_arguments/short.json", "single", "fp32", 16),
    ],
)
def test_an_imported_run_trains(
    file: str,
    engine: str,
    precision: str,
    batch: int,
    drivetrain: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, words = drivetrain("import", str(FOLDER / file), "--onto", str(RECIPE), "-o", "new.yaml")
    assert code == 0, words
    code, _, words = drivetrain("train", "new.yaml", *SHORT, "--quiet")
    assert code == 0, words
    report = json.loads(Path("run/report.json").read_text())
    assert report["status"] == "completed"
    assert (report["engine"], report["precision"], report["steps"]) == (engine, precision, 2)
    assert report["samples"] == 2 * batch
    assert len(report["ranks"]) == (2 if engine == "fsdp" else 1)
