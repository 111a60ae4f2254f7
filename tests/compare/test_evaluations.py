"""Evaluations side by side: intervals and paired differences, against SciPy's, and the verb that makes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from drivetrain.compare.evaluations import Evaluation, difference, interval, table_of
from drivetrain.compare.scores import Scores, read_scores
from drivetrain.workloads.sample_scores import ANSWERS
from tests.generation.test_prompts import run_file, trained
from tests.importing.made import small
from tests.tiny_language import talk, write_lines

Run = Callable[..., tuple[int, str, str]]
OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

model, loss = nn.Linear(2, 1), nn.MSELoss()
train_data = evaluation_data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
"""


def answers(right: np.ndarray, samples: str = "same") -> Scores:
    return Scores(right.astype(float), np.ones(len(right)), samples)


@pytest.mark.parametrize(("right", "count"), [(0, 20), (7, 20), (359, 359), (180, 359)])
def test_the_interval_of_a_share_is_wilsons(right: int, count: int) -> None:
    expected = stats.binomtest(right, count).proportion_ci(method="wilson")
    found = interval(answers(np.arange(count) < right))
    assert found == pytest.approx([expected.low, expected.high], abs=1e-9)


def test_the_interval_of_a_mean_is_students() -> None:
    sums = np.random.default_rng(0).normal(2.0, 0.5, 25)
    expected = stats.ttest_1samp(sums, 0).confidence_interval(0.95)
    assert interval(Scores(sums, np.ones(25), "")) == pytest.approx([expected.low, expected.high])


@pytest.mark.parametrize(
    ("units", "low", "high"),
    [([0.5] * 8, 0.36, 0.64), ([1.0] * 8, 0.67, 1.0), ([0.0] * 8, 0.0, 0.33), ([1.0] * 7 + [0.5], 0.65, 1.0)],
    ids=["ties", "wins", "losses", "wins and a tie"],
)
def test_the_interval_of_a_win_rate_has_a_width_where_all_prompts_bring_the_same(
    units: list[float], low: float, high: float, tmp_path: Path
) -> None:
    kept = {"references": "the same", "samples": "the same", f"{ANSWERS}win_rate_tokens": np.array(units)}
    np.savez(tmp_path / "scores.npz", **kept)  # type: ignore[arg-type]
    scores = read_scores(tmp_path / "scores.npz", "win_rate_tokens")
    assert scores is not None
    found = interval(scores)
    assert found == pytest.approx([low, high], abs=0.02)
    assert found[0] <= scores.sums.mean() <= found[1]
    assert Evaluation("m", None, None, {"win_rate_tokens": scores}).standard_errors["win_rate_tokens"] > 0.05  # type: ignore[operator]
    ends = difference(scores, scores)["interval"]
    assert ends[0] < 0 < ends[1], "no two prompts may differ, and the next one may"


def test_a_difference_is_paired_over_the_same_samples_alone() -> None:
    dice = np.random.default_rng(1)
    one, other = dice.random(31) < 0.7, dice.random(31) < 0.5
    expected = stats.ttest_rel(one.astype(float), other.astype(float)).confidence_interval(0.95)
    found = difference(answers(one), answers(other))
    assert found["interval"] == pytest.approx([expected.low, expected.high], rel=1e-2)  # degrees are rounded down
    assert found["paired"]
    apart = difference(answers(one), answers(other, "others"))
    assert not apart["paired"]
    error = math.sqrt(one.var(ddof=1) / 31 + other.var(ddof=1) / 31)
    assert apart["interval"][1] - apart["value"] == pytest.approx(stats.t.isf(0.025, 30) * error)


def test_models_that_answer_alike_are_told_apart_by_nothing() -> None:
    same = answers(np.ones(50))
    low, high = difference(same, same)["interval"]
    assert low < 0 < high


def test_intervals_cover_the_difference_as_often_as_they_state() -> None:
    """Of pairs of models whose answers depend on each other, as those of checkpoints of one run do."""
    dice = np.random.default_rng(2)
    covered = 0
    for _ in range(400):
        shared = dice.random(200)
        one, other = shared + 0.2 * dice.random(200) < 0.9, shared + 0.2 * dice.random(200) < 0.8
        low, high = difference(answers(one), answers(other))["interval"]
        covered += low <= 0.1 <= high
    assert 0.92 <= covered / 400 <= 0.98


def test_differences_are_from_the_first_of_each_data_set_that_did_not_fail() -> None:
    def of(model: str, data: str, right: int) -> Evaluation:
        result = {"checkpoint": "step-1", "metrics": {"accuracy": right / 10}, "samples": 10, "seconds": 1.0}
        return Evaluation(model, data, result, {"accuracy": answers(np.arange(10) < right)})

    failed = Evaluation("a", "two", None, {}, "no memory")
    rows = table_of([of("a", "one", 5), of("b", "one", 7), failed, of("b", "two", 2), of("c", "two", 4)])
    found = [row["differences"].get("accuracy", {}).get("value") for row in rows]
    assert found == [None, pytest.approx(0.2), None, None, pytest.approx(0.2)]
    assert rows[2]["failure"] == "no memory"


# --- the verb ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def out(drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with two checkpoints, and two more data sets."""
    monkeypatch.chdir(tmp_path)
    run_file()
    for name, count in (("one", 12), ("two", 5)):
        write_lines(Path(f"{name}.jsonl"), [talk(f"say {number}", f"it is {number}") for number in range(count)])
    trained(drivetrain, "out", "evaluation.generation=[token_f1,bleu]", "evaluation.batch_size=2", "generate.samples=4")
    return Path("out")


def test_checkpoints_and_data_sets_make_one_table(drivetrain: Run, out: Path) -> None:
    first, last = sorted(map(str, (out / "checkpoints").iterdir()))
    both = ["--data", "one.jsonl", "--data", "two.jsonl"]
    code, told, err = drivetrain("evaluate", first, last, "device=cpu", *both, "--json")
    assert code == 0, err
    rows = json.loads(told)["rows"]
    assert [(row["data"], row["model"], row["samples"]) for row in rows] == [
        *(("one.jsonl", first, 12), ("one.jsonl", last, 12)),
        *(("two.jsonl", first, 5), ("two.jsonl", last, 5)),
    ]
    for one, other in (rows[:2], rows[2:]):
        for name in ("loss", "token_f1"):
            difference = other["differences"][name]
            assert difference["value"] == pytest.approx(other["metrics"][name] - one["metrics"][name])
            assert difference["paired"]
        assert one["differences"] == {}
        assert "bleu" in one["metrics"]
        assert "bleu" not in one["intervals"], "BLEU is no mean over answers"
    code, alone, err = drivetrain("evaluate", last, "device=cpu", "--data", "two.jsonl")
    assert code == 0, err
    assert json.loads(alone)["metrics"] == rows[3]["metrics"]
    assert json.loads(alone)["intervals"] == rows[3]["intervals"]
    code, table, err = drivetrain("evaluate", "out", "--checkpoint", first, "--checkpoint", "last")
    assert code == 0, err
    assert "difference" in table.splitlines()[0]
    assert [line.split("  ")[0] for line in table.splitlines()[1:3]] == [f"out {first}", "out last"]


def test_all_that_is_wrong_with_several_is_reported_before_the_first(drivetrain: Run, out: Path) -> None:
    code, _, err = drivetrain("evaluate", "out", "none.yaml", "t.jsonl", "--data", "nowhere.jsonl")
    told = " ".join(err.split())
    assert code == 2
    for words in ("out: workload.data.evaluation: nowhere.jsonl", "none.yaml: ", "t.jsonl: ", "before any work"):
        assert words in told, told
    step = str(next((out / "checkpoints").iterdir()))
    code, _, err = drivetrain("evaluate", step, "--checkpoint", "last")
    assert code == 2
    assert "is a checkpoint itself" in " ".join(err.split())
    code, _, err = drivetrain("evaluate", "out", "none.yaml", "--checkpoint", step)
    assert code == 2
    assert "is one checkpoint, and 2 models were given" in " ".join(err.split())
    code, _, err = drivetrain("evaluate", "batch_size=4")
    assert code == 2
    assert "only overrides were given" in " ".join(err.split())


def test_data_for_a_run_that_takes_none_are_refused_by_their_option(
    drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = drivetrain("train", str(small(tmp_path)), "output=digits", "loop.steps=1", "--quiet")
    assert code == 0, err
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "own.yaml").write_text("workload: {type: module, path: own.py}\nbatch_size: 8\nloop: {steps: 1}\n")
    code, _, err = drivetrain("train", "own.yaml", "output=own", "--quiet")
    assert code == 0, err
    code, _, err = drivetrain("evaluate", "digits", "own", "--data", "two.jsonl")
    told = " ".join(err.split())
    assert code == 2
    assert "digits: --data two.jsonl: digits are bundled and take no path own:" in told
    assert "own: --data two.jsonl: the run's workload takes no data by their path leave it out" in told
    assert "workload.data" not in told


@pytest.mark.usefixtures("out")
def test_one_that_fails_is_a_row_with_its_reason(drivetrain: Run) -> None:
    Path("empty.jsonl").write_text('{"messages": 3}\n')
    code, told, err = drivetrain("evaluate", "out", "--data", "empty.jsonl", "--data", "two.jsonl", "--json")
    assert code == 1, err
    failed, done = json.loads(told)["rows"]
    assert "empty.jsonl" in failed["failure"]
    assert failed["metrics"] == {}
    assert done["samples"] == 5
