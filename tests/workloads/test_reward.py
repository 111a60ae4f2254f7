"""A reward model: the checkpoint that Transformers loads as a sequence classifier gives the trained scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from drivetrain.cli import main
from drivetrain.errors import UserError
from drivetrain.workloads.language_data import LanguageReader
from drivetrain.workloads.loss_contract import LOSS, NO_CONTEXT
from drivetrain.workloads.reward import CENTRING, RewardWorkload
from tests.tiny_language import LLAMA, config, write_lines

ROWS = [
    {"prompt": f"ask {n}", "chosen": "yes " * (n % 3 + 1), "rejected": "no " * (n % 4 + 1), "margin": n / 4}
    for n in range(8)
]


def workload(folder: Path, packing: bool = True, **preference: Any) -> RewardWorkload:
    path = write_lines(folder / "pairs.jsonl", ROWS)
    made = config(folder, stage="reward", train=path, template="chatml", evaluation_fraction=0, packing=packing)
    block = made.preference.model_validate(preference)
    return RewardWorkload(made.model_copy(update={"preference": block}), 0)


@pytest.mark.parametrize("packing", [True, False])
def test_scores_are_those_of_transformers_classifier_whatever_stands_beside_an_answer(
    tmp_path: Path, packing: bool
) -> None:
    work = workload(tmp_path, packing, centring=0.01)
    torch.manual_seed(0)
    model = work.build_model()
    assert work.packs == packing
    model.save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    work.save_assets(model, tmp_path / "saved")
    pairs = [work.train.load(index, 0) for index in range(len(ROWS))]
    batch = work.collate(pairs)
    sums, count = work.loss_sums(model, batch, NO_CONTEXT), work.counts(batch)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert loaded.config.id2label == {0: "reward"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    scores = []
    for row in ROWS:
        for side in ("chosen", "rejected"):
            talk = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
            ids = tokenizer.apply_chat_template(talk, return_tensors="pt", return_dict=True)["input_ids"]
            scores.append(loaded(input_ids=ids[:, :-1]).logits[0, 0])  # the line's end behind it is not trained
    chosen, rejected = torch.stack(scores).view(-1, 2).unbind(1)
    margins = torch.arange(8) / 4
    assert (sums[LOSS] / count[LOSS]).item() == pytest.approx(
        -F.logsigmoid(chosen - rejected - margins).mean().item(), rel=1e-5
    )
    assert (sums[CENTRING] / count[CENTRING]).item() == pytest.approx(
        (chosen + rejected).square().mean().item(), rel=1e-4
    )
    assert work.terms == {LOSS: 1.0, CENTRING: 0.01}


@pytest.mark.parametrize("adapter", [None, {"method": "lora", "rank": 2}])
def test_a_reward_model_learns_which_answers_are_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], adapter: Any
) -> None:
    """Short ones; the prompts of the evaluation are others."""
    rows = [{"prompt": f"ask {n}", "chosen": "a" * (n % 3 + 1), "rejected": "b" * (n % 3 + 1)} for n in range(120)]
    model: dict[str, Any] = {"config": LLAMA}
    if adapter is not None:
        base = workload(tmp_path).build_model()
        base.save_pretrained(tmp_path / "base")  # type: ignore[operator]
        workload(tmp_path).tokenizer.save_pretrained(tmp_path / "base")
        model = {"path": str(tmp_path / "base")}
    data = {"train": write_lines(tmp_path / "rows.jsonl", rows), "template": "chatml", "length": 64}
    data["cache"] = str(tmp_path / "cache")
    run = {
        "workload": {"type": "language_model", "stage": "reward", "model": model, "data": data},
        "batch_size": 12,
        "loop": {"epochs": 3},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "output": str(tmp_path / "run"),
        **({} if adapter is None else {"adapter": adapter}),
    }
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "run.json"), "--quiet"])
    assert ended.value.code == 0, capsys.readouterr().err
    metrics = json.loads((tmp_path / "run" / "report.json").read_text())["metrics"]
    assert metrics["reward_accuracy"] > 0.9
    assert metrics["reward_margin"] > 0.5


@pytest.mark.parametrize("margin", ["slightly better", 10**400, True], ids=["words", "huge", "truth"])
def test_margins_are_read_by_the_stage_that_learns_from_them_alone(tmp_path: Path, margin: Any) -> None:
    rows = [*ROWS[:3], {**ROWS[3], "margin": margin}]
    path = write_lines(tmp_path / "pairs.jsonl", rows)
    for stage in ("dpo", "orpo", "simpo", "cpo"):
        made = config(tmp_path, stage=stage, train=path, template="chatml", evaluation_fraction=0)
        assert len(LanguageReader(made, 0).read().train) == 4
    made = config(tmp_path, stage="reward", train=path, template="chatml", evaluation_fraction=0)
    with pytest.raises(UserError, match=r"margin is '.*', no finite number"):
        LanguageReader(made, 0).read()


def test_a_reward_model_that_is_to_answer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "pairs.jsonl", ROWS)
    run = {
        "workload": {
            "type": "language_model",
            "stage": "reward",
            "model": {"config": LLAMA},
            "data": {"train": path, "template": "chatml"},
            "generate": {},
            "preference": {"beta": 0.5},
        },
        "batch_size": 2,
        "loop": {"steps": 1},
    }
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "run.json")])
    words = capsys.readouterr().err
    assert ended.value.code == 2
    assert "a model that scores answers makes none" in words
    assert "the loss bradley_terry has none" in words
