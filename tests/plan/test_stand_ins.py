"""A run whose data are not there is planned with made ones, of a number and a length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.errors import UserError
from drivetrain.plan.as_asked import plan_as_asked
from drivetrain.plan.catalogue import catalogue
from drivetrain.plan.estimate import Traced
from drivetrain.plan.machines import this_machine
from drivetrain.plan.rows import Plan
from drivetrain.plan.stand_ins import with_made_data
from tests.plan.measured import LLAMA

BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] w ##o ##r ##d"


def run_file(folder: Path, workload: dict[str, Any]) -> Path:
    run = {"workload": workload, "batch_size": 8, "loop": {"epochs": 2}, "output": str(folder / "run")}
    (folder / "run.yaml").write_text(json.dumps(run))
    return folder / "run.yaml"


def planned(file: Path, samples: int | None, length: int | None) -> Plan:
    with with_made_data(file, samples, length) as made:
        return plan_as_asked(made, [[]], Traced(this_machine(catalogue())))


def language(**more: Any) -> dict[str, Any]:
    return {"type": "language_model", "model": {"config": LLAMA}, "data": {"train": "none.txt"}, **more}


def texts(folder: Path) -> dict[str, Any]:
    (folder / "vocab.txt").write_text(WORDS.replace(" ", "\n"))
    model = {"tokenizer": str(folder / "vocab.txt"), "config": BERT}
    return {"type": "text_classification", "model": model, "data": {"train": "none.csv"}}


@pytest.mark.parametrize("kind", ["pretrain", "sft", "texts"])
def test_samples_and_length_stand_for_data_that_are_not_there(tmp_path: Path, kind: str) -> None:
    data = {"train": "none.jsonl", "template": "plain"}
    workload = {"pretrain": language(), "sft": language(stage="sft", data=data), "texts": texts(tmp_path)}[kind]
    file = run_file(tmp_path, workload)
    with pytest.raises(UserError, match="none"):
        planned(file, None, None)
    plan = planned(file, 64, 32)
    [row] = plan.rows
    assert row.costs is not None, row.reason
    assert plan.steps == 2 * 64 / 8
    inputs = 31 if kind == "sft" else 32  # a conversation's last token is a target alone
    assert row.costs.tokens == 8 * inputs
    assert row.overrides == ()


def test_a_large_number_is_made_of_a_few_samples_that_repeat(tmp_path: Path) -> None:
    file = run_file(tmp_path, language())
    with with_made_data(file, 300_000, 32) as made:
        data = json.loads(made.read_text())["workload"]["data"]
        assert Path(data["train"]).stat().st_size <= 2**18
        plan = plan_as_asked(made, [[]], Traced(this_machine(catalogue())))
    assert plan.steps == 2 * 300_000 / 8
    assert plan.rows[0].costs is not None
    assert plan.rows[0].costs.tokens == 8 * 32


def test_one_without_the_other_and_other_workloads_are_refused(tmp_path: Path) -> None:
    file = run_file(tmp_path, language())
    with pytest.raises(UserError, match="--length"):
        planned(file, 64, None)
    pictures = {"type": "image_classification", "model": {"config": {"model_type": "resnet"}}}
    with pytest.raises(UserError, match="image_classification"):
        planned(run_file(tmp_path, {**pictures, "data": {"source": "digits"}}), 64, 32)
    tokenised = language(model={"config": LLAMA, "tokenizer": "characters"})
    with pytest.raises(UserError, match="for bytes alone"):
        planned(run_file(tmp_path, tokenised), 64, 32)
