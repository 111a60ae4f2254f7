"""The noise of a metric's difference, against NumPy and simulations of the same model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivetrain.compare.advice import advice
from drivetrain.compare.metric_noise import ONE_SEED, noise_of, residual
from drivetrain.compare.result_rows import Comparison
from drivetrain.compare.scores import Scores, read_scores
from drivetrain.workloads.sample_scores import write_scores
from tests.compare.made import comparison, report


def scored(folder: Path, **rows: list[np.ndarray]) -> Comparison:
    """Rows of runs, each with its answers: (samples,) of 0 and 1; seeds in order, on the same samples."""
    found = comparison(
        folder,
        **{
            name: [report(accuracy=float(a.mean()), data={"evaluation_samples": len(a)}) for a in answers]
            for name, answers in rows.items()
        },
    )
    for row, answers in zip(found.rows, rows.values(), strict=True):
        for seed, (result, right) in enumerate(zip(row.results, answers, strict=True)):
            (result.folder / "run.yaml").write_text(json.dumps({"seed": seed, "precision": row.label}))
            write_scores(
                {"right": right.astype(np.uint8), "targets": np.arange(len(right))}, result.folder / "scores.npz"
            )
    return found


def noise(found: Comparison) -> Any:
    one, other = ([row] for row in found.rows)
    return noise_of(one, other, "accuracy", residual([one, other], "accuracy"))


def test_one_seed_on_the_same_samples_is_mcnemars_variance(tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    a, b = dice.random(400) < 0.9, dice.random(400) < 0.9
    found = noise(scored(tmp_path, a=[a], b=[b]))
    differing, gained = int((a != b).sum()), int(a.sum()) - int(b.sum())
    mcnemar = (differing - gained**2 / 400) / 400**2 * 400 / 399
    assert found.variance == pytest.approx(ONE_SEED * mcnemar)


def test_equal_answers_still_have_noise(tmp_path: Path) -> None:
    a = np.arange(100) < 90
    assert noise(scored(tmp_path, a=[a], b=[a])).variance == pytest.approx(ONE_SEED / 100**2)


def test_several_seeds_on_the_same_samples_have_the_variance_of_a_table(tmp_path: Path) -> None:
    """Against the mean squares of the two-way table of differences, computed as in a textbook."""
    dice = np.random.default_rng(1)
    a, b = ([dice.random(200) < p for _ in range(4)] for p in (0.9, 0.85))
    table = np.stack(a).astype(float) - np.stack(b)
    n, s = table.shape
    seeds, samples = table.mean(1, keepdims=True), table.mean(0, keepdims=True)
    ms_seeds = s * ((seeds - table.mean()) ** 2).sum() / (n - 1)
    ms_samples = n * ((samples - table.mean()) ** 2).sum() / (s - 1)
    ms_rest = ((table - seeds - samples + table.mean()) ** 2).sum() / ((n - 1) * (s - 1))
    expected = (ms_seeds + ms_samples - ms_rest) / (n * s)
    assert noise(scored(tmp_path, a=a, b=b)).variance == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("of_seeds", [0.0, 0.03])
def test_the_variance_is_right_on_average(of_seeds: float, tmp_path: Path) -> None:
    """Rows of equal accuracy, whose models and samples are drawn anew: their differences vary as estimated."""
    dice = np.random.default_rng(2)
    differences, estimated = [], []
    for number in range(100):
        hard = dice.random(150) * 0.3

        def run(hard: np.ndarray = hard) -> np.ndarray:
            answers: np.ndarray = dice.random(150) < 0.95 - hard + of_seeds * dice.standard_normal()
            return answers

        a, b = ([run() for _ in range(3)] for _ in range(2))
        differences.append(np.mean(a) - np.mean(b))
        estimated.append(noise(scored(tmp_path / str(number), a=a, b=b)).variance)
    assert math.sqrt(np.mean(estimated)) == pytest.approx(np.std(differences), rel=0.25)


def test_the_variance_of_a_mean_loss_is_that_of_a_ratio(tmp_path: Path) -> None:
    sums, counts = np.array([4.0, 10.0, 3.0, 8.0]), np.array([2.0, 4.0, 2.0, 4.0])
    write_scores({"loss": np.stack([sums, counts], axis=1)}, tmp_path / "scores.npz")
    scores = read_scores(tmp_path / "scores.npz", "loss")
    assert scores is not None
    ratio = sums.sum() / counts.sum()
    expected = ((sums - ratio * counts) ** 2).sum() / 3 / 4 / counts.mean() ** 2
    assert scores.variance == pytest.approx(expected)
    assert read_scores(tmp_path / "scores.npz", "accuracy") is None
    assert read_scores(tmp_path / "scores.npz", "macro_f1") is None


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut short"])
def test_scores_that_cannot_be_read_are_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "scores.npz").write_bytes(content)
    assert read_scores(tmp_path / "scores.npz", "accuracy") is None
    assert read_scores(tmp_path / "nowhere.npz", "accuracy") is None


def test_runs_on_other_samples_are_no_pairs() -> None:
    ones = np.ones(3)
    assert Scores(ones, ones, "a").is_paired_with(Scores(ones, ones, "a"))
    assert not Scores(ones, ones, "a").is_paired_with(Scores(ones, ones, "b"))
    assert not Scores(ones, ones, "a").is_paired_with(Scores(ones, 2 * ones, "a"))


def test_a_small_difference_is_found_where_the_samples_are_the_same(tmp_path: Path) -> None:
    """30 of 2,000 samples more are right, and none fewer: sure in pairs, noise between independent shares."""
    worse = np.arange(2000) < 1800
    better = np.arange(2000) < 1830
    assert "worse by accuracy: a (0.9000)" in advice(scored(tmp_path / "pairs", a=[worse], b=[better]))
    unpaired = scored(tmp_path / "others", a=[worse], b=[better])
    for row in unpaired.rows:
        (row.results[0].folder / "scores.npz").unlink()
    assert "worse" not in advice(unpaired)
