"""Rows, columns, advice and files, from made-up reports."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from drivetrain.compare.advice import advice
from drivetrain.compare.figures import Figures
from drivetrain.compare.files import as_csv, as_json, as_markdown
from drivetrain.compare.plots import plots
from drivetrain.compare.result_rows import Comparison, largest_difference
from drivetrain.compare.table import comparison_table
from drivetrain.runtime.strict_json import restored
from drivetrain.tracking.events import StepDone
from drivetrain.tracking.jsonl import JsonlTracker
from tests.compare.made import comparison, report


@pytest.fixture
def three(tmp_path: Path) -> Comparison:
    """A reference, a quicker row as good, and a quickest row that is worse; and one that failed."""
    return comparison(
        tmp_path,
        fp32=[report(100, 0.90, 4 * 2**20), report(110, 0.92, 4 * 2**20)],
        bf16=[report(200, 0.91, 2**20), report(190, 0.91, 2**20)],
        rough=[report(400, 0.50, 2**20), report(400, 0.50, 2**20)],
        broken=[None, None],
    )


def texts(found: Comparison, column: str) -> dict[str, str]:
    figures = Figures(found)
    (wanted,) = [c for c in figures.columns if c.name == column]
    return {row.label: wanted.text(row) for row in found.rows}


def test_figures_are_means_over_seeds_with_their_spread(three: Comparison) -> None:
    assert texts(three, "samples/s")["fp32"] == "105 ± 7.1"
    assert texts(three, "accuracy")["fp32"] == "0.9100 ± 0.0141"
    assert texts(three, "accuracy")["broken"] == ""


def test_speed_up_is_seed_by_seed_against_the_first_row_that_completed(three: Comparison, tmp_path: Path) -> None:
    assert texts(three, "speed-up")["fp32"] == "1.00"
    assert texts(three, "speed-up")["bf16"].startswith("1.86")  # the mean of 200/100 and 190/110
    other = comparison(tmp_path / "other", broken=[None], fp32=[report(100)], bf16=[report(300)])
    assert texts(other, "speed-up") == {"broken": "", "fp32": "1.00", "bf16": "3.00"}


def test_the_loss_curves_largest_difference_is_relative_to_the_reference(three: Comparison) -> None:
    # at step 1 the second row's curve is a hundredth of 0.5 e^(-1/5) above
    shown = texts(three, "loss differs")
    assert shown["fp32"] == ""
    assert float(shown["bf16"]) == pytest.approx(0.005 * 0.8187 / 0.90937, rel=0.05)
    assert largest_difference([({1: 2.0, 3: 9.0}, {1: 1.0, 2: 5.0}), ({}, {})]) == 1.0
    assert largest_difference([({1: 2.0}, {2: 1.0})]) is None


def test_losses_and_metrics_that_are_not_finite_are_neither_an_error_nor_the_best(tmp_path: Path) -> None:
    assert largest_difference([({1: math.nan, 2: 1.0}, {1: math.nan, 2: 1.0})]) == 0.0
    assert largest_difference([({1: 1.0, 2: math.nan}, {1: 1.0, 2: 1.0})]) == math.inf
    metrics = [{"accuracy": 0.5, "perplexity": value} for value in (math.inf, 7.0, 9.0, math.nan)]
    first, second, third, fourth = (report(metrics=each) for each in metrics)
    found = comparison(tmp_path, fp32=[first, second], bf16=[second, third], other=[fourth], last=[third])
    (tmp_path / "bf160" / "events.jsonl").unlink()
    JsonlTracker(tmp_path / "bf160").handle(StepDone(1, 0.1, math.inf, 1.0, 1e-3, None, 0, 10, 5.0, 2.0))
    assert texts(found, "loss differs")["bf16"] == "inf"
    assert texts(found, "perplexity") == {
        "fp32": "inf",
        "bf16": "8.0000 ± 1.4142",
        "other": "nan",
        "last": "9.0000",
    }
    figures = Figures(found)
    perplexity = next(column for column in figures.columns if column.name == "perplexity")
    assert not any(figures.is_best(row, perplexity) for row in found.rows if row.label in ("fp32", "other"))
    kept = json.loads(as_json(found), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert restored(kept)["rows"][0]["perplexity"] == math.inf
    assert plots(found)["loss"]


def marked(found: Comparison) -> dict[str, list[str]]:
    figures = Figures(found)
    return {
        column.name: [row.label for row in found.rows if figures.is_best(row, column)] for column in figures.columns
    }


def test_the_best_of_each_column_is_marked(three: Comparison) -> None:
    best = marked(three)
    assert best["samples/s"] == ["rough"]
    assert best["time"] == ["rough"]
    assert best["accuracy"] == best["loss"] == ["fp32", "bf16"], "the two are not told apart, and rough is worse"
    assert best["peak tensor"] == ["bf16", "rough"]
    assert best["utilisation"] == [], "more of it is not better"


def test_nothing_is_marked_within_noise(tmp_path: Path) -> None:
    found = comparison(tmp_path, fp32=[report(100, 0.90, 1000)], bf16=[report(109, 0.91, 1001)])
    assert not any(marked(found).values())
    seeds = {"fp32": [report(r) for r in (90, 100, 120)], "bf16": [report(r) for r in (80, 95, 100)]}
    assert not any(marked(comparison(tmp_path / "seeds", **seeds)).values())


def test_what_decides_comes_first(three: Comparison) -> None:
    deciding = [column.name for column in Figures(three).deciding]
    assert deciding == ["accuracy", "samples/s", "speed-up", "time", "peak tensor", "loss differs"]


def test_each_column_is_explained(three: Comparison) -> None:
    assert all(len(column.about) > 10 for column in Figures(three).columns)


def test_predictions_have_no_columns_of_training(tmp_path: Path) -> None:
    def names(verb: str) -> set[str]:
        return {column.name for column in Figures(comparison(tmp_path / verb, a=[report(verb=verb)])).columns}

    assert names("train") - names("predict") == {"time", "skipped steps"}


def test_files_hold_every_row_with_plain_numbers(three: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(three))))
    assert [row["precision"] for row in rows] == ["fp32", "bf16", "rough", "broken"]
    assert float(rows[0]["samples_per_second"]) == 105
    assert float(rows[0]["peak_tensor_bytes"]) == 4 * 2**20
    assert (rows[3]["status"], rows[3]["samples_per_second"]) == ("failed", "")
    kept = json.loads(as_json(three))
    assert kept["rows"][1]["runs"][0]["report"]["samples_per_second"] == 200
    assert kept["advice"] == advice(three)


def test_markdown_is_one_table_whatever_the_reasons_hold(three: Comparison) -> None:
    lines = [line for line in as_markdown(three).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 4
    columns = {len(line.replace("\\|", "").split("|")) for line in lines}
    assert len(columns) == 1
    assert "**400 ± 0**" in as_markdown(three)


def test_a_narrow_terminal_gets_what_tells_most_and_hears_what_is_left_out(three: Comparison) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(comparison_table(three, console))
    text = console.export_text()
    assert "…" not in text, "nothing is cut short"
    assert max(map(len, text.splitlines())) <= 80
    for words in ("accuracy", "time", "samples/s", "too narrow for", "fp32", "rough"):
        assert words in text


def test_the_terminals_table_has_all_rows_and_reasons(three: Comparison) -> None:
    console = Console(width=220, record=True, file=io.StringIO())
    console.print(comparison_table(three, console))
    text = console.export_text()
    for words in ("fp32", "bf16", "rough", "broken", "it broke <b>badly</b> | so", "Choose bf16"):
        assert words in text
