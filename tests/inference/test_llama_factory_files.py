"""The files of LLaMA-Factory's predict: its keys, and its scores by NLTK's and rouge-chinese's own figures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import jieba
import pytest
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from rouge_chinese import Rouge

from drivetrain.generation.similarity import similarity
from tests.generation.test_prompts import run_file, trained

Run = Callable[..., tuple[int, str, str]]
PAIRS = [
    ("房间很干净，服务态度也很好", "房间干净，服务很好，位置方便"),
    ("The room was clean.", "The room was clean and the staff friendly."),
    ("好好好，很好", "很好"),
    ("", "Nothing was said."),
    ("Something.", " "),
]


def test_scores_are_those_of_llama_factorys_libraries() -> None:
    expected: dict[str, list[float]] = {"bleu-4": [], "rouge-1": [], "rouge-2": [], "rouge-l": []}
    for answer, reference in PAIRS:
        words = [" ".join(jieba.cut(text)) for text in (answer, reference)]
        scores = Rouge().get_scores(*words)[0] if all(each.split() for each in words) else {}
        for name in ("rouge-1", "rouge-2", "rouge-l"):
            expected[name].append(round(scores[name]["f"] * 100, 4) if scores else 0.0)
        smooth = SmoothingFunction().method3
        bleu = sentence_bleu([list(reference)], list(answer), smoothing_function=smooth)
        expected["bleu-4"].append(round(bleu * 100, 4))
    answers, references = zip(*PAIRS, strict=True)
    found = similarity(answers, references)
    assert found == {name: pytest.approx(statistics.fmean(each)) for name, each in expected.items()}
    assert 0 < found["rouge-l"] < 100
    assert similarity([], []) == {}


def test_predict_leaves_its_files_beside_the_rows(
    drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_file()
    trained(drivetrain, "out", "loop.steps=3")
    code, _, err = drivetrain("predict", "out", "--llama-factory", "saves/predict")
    assert code == 0, err
    folder = Path("saves/predict")
    rows = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (folder / "generated_predictions.jsonl").read_text().splitlines()]
    assert lines == [{"prompt": r["prompt"], "predict": r["answer"], "label": r["reference"]} for r in rows]
    assert len(lines) == 32
    assert lines[1]["label"] == "it is 1"
    results = json.loads((folder / "predict_results.json").read_text())
    scores = similarity([r["answer"] for r in rows], [r["reference"] for r in rows])
    assert {name: results[f"predict_{name}"] for name in scores} == scores
    assert results["predict_samples_per_second"] == pytest.approx(32 / results["predict_runtime"], rel=1e-2)
    assert "no row has a reference" not in err
    Path("p.txt").write_text("say 1\nsay 2\n")
    code, _, err = drivetrain("predict", "out", "--data", "p.txt", "--llama-factory", "prompts")
    assert code == 0, err
    assert "note no row has a reference to compare with: there are no scores" in err
    assert not any("bleu" in name for name in json.loads(Path("prompts/predict_results.json").read_text()))
    code, _, err = drivetrain("predict", "out", "workload.generate=null", "--llama-factory", "elsewhere", "-o", "p.csv")
    assert code == 2
    told = " ".join(err.split())
    assert "lets its model answer no prompts" in told
    assert "p.csv, which is no .jsonl" in told
    assert not Path("elsewhere").exists()
