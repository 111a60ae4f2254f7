"""Answers at evaluations, scored against their references: in the curve, the report, and by `drivetrain evaluate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sacrebleu

from tests.generation.test_prompts import Run, run_file, trained

ASKED = "evaluation.generation=[exact_match,bleu,own_scores:first_letters]"
OWN = """
def first_letters(answers, references):
    return sum(a[:1] == r[:1] for a, r in zip(answers, references)) / len(answers)

first_letters.higher_is_better = True
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run_file()
    Path("own_scores.py").write_text(OWN)
    return tmp_path


@pytest.mark.usefixtures("here")
def test_scores_of_answers_are_metrics_of_the_run(drivetrain: Run) -> None:
    curve, samples = trained(drivetrain, "out", ASKED, "evaluation.metric=bleu", "optimizer.lr=0.05", "loop.steps=12")
    for metrics, step in zip(curve[-4:], (3, 6, 9, 12), strict=True):
        rows = [row for row in samples if row["step"] == step and row["reference"] is not None]
        assert len(rows) == 2
        answers, references = [row["answer"] for row in rows], [row["reference"] for row in rows]
        assert metrics["bleu"] == pytest.approx(sacrebleu.corpus_bleu(answers, [references]).score)
        assert metrics["exact_match"] == sum(a == r for a, r in zip(answers, references, strict=True)) / 2
        assert metrics["first_letters"] == sum(a[:1] == r[:1] for a, r in zip(answers, references, strict=True)) / 2
    report = json.loads(Path("out/report.json").read_text())
    assert report["metrics"] == curve[-1]
    assert report["best"]["metric"] == "bleu"
    assert report["best"]["value"] == max(metrics["bleu"] for metrics in curve[-4:])
    code, told, _ = drivetrain("evaluate", "run.yaml", "output=out", ASKED, "--checkpoint", "last")
    assert code == 0
    found = json.loads(told)["metrics"]
    assert {name: found[name] for name in ("bleu", "exact_match", "first_letters")} == pytest.approx(
        {name: report["metrics"][name] for name in ("bleu", "exact_match", "first_letters")}
    )


@pytest.mark.usefixtures("here")
def test_what_cannot_be_scored_is_refused_before_the_training(drivetrain: Run) -> None:
    for overrides, told in (
        (["evaluation.generation=[blue]"], "did you mean bleu?"),
        (["evaluation.generation=[bleu]", "workload.generate=null"], "lets its model answer no prompts"),
        (["evaluation.generation=[bleu]", "generate.samples=0"], "no prompt has a reference"),
        (["evaluation.generation=[own_scores:last_letters]"], "own_scores has no last_letters"),
        (["evaluation.generation=[bleu]", "evaluation.metric=rouge_l"], "there is no metric rouge_l"),
    ):
        code, _, err = drivetrain("train", "run.yaml", "output=out", "--quiet", *overrides)
        assert code == 2, overrides
        assert told in " ".join(err.split())
    assert not Path("out/checkpoints").exists()
