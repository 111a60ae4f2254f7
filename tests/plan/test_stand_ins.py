"""A run whose data are not there is planned with made ones, of a number and a length."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
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
from drivetrain.runtime import scratch
from tests import small_tokenizers
from tests.plan.measured import LLAMA

BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] w ##o ##r ##d"


def run_file(folder: Path, workload: dict[str, Any]) -> Path:
    run = {"workload": workload, "batch_size": 8, "loop": {"epochs": 2}, "output": str(folder / "run")}
    (folder / "run.yaml").write_text(json.dumps(run))
    return folder / "run.yaml"


def planned(file: Path, samples: int | None, length: int | None, *overrides: str) -> Plan:
    with with_made_data(file, samples, length, overrides) as made:
        return plan_as_asked(made, [overrides], Traced(this_machine(catalogue())))


def language(**more: Any) -> dict[str, Any]:
    return {"type": "language_model", "model": {"config": LLAMA}, "data": {"train": "none.txt"}, **more}


def texts(folder: Path) -> dict[str, Any]:
    (folder / "vocab.txt").write_text(WORDS.replace(" ", "\n"))
    model = {"tokenizer": str(folder / "vocab.txt"), "config": BERT}
    return {"type": "text_classification", "model": model, "data": {"train": "none.csv"}}


def test_the_adapter_shown_in_the_docs_is_planned_from_a_folder_without_weights(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/how-to/plan.md").read_text()
    (shown,) = [block for block in re.findall(r"^```yaml\n(.*?)^```", page, flags=re.M | re.S) if "lora" in block]
    model = tmp_path / "llama-8b"
    small_tokenizers.made("gpt2").save_pretrained(model)
    (model / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 512, "max_position_embeddings": 2048}))
    assert "models/llama-8b" in shown
    (tmp_path / "run.yaml").write_text(shown.replace("models/llama-8b", str(model)))
    file = tmp_path / "run.yaml"
    plan = planned(file, 640, 512, f"output={tmp_path / 'run'}")
    [row] = plan.rows
    assert row.costs is not None, row.reason
    assert plan.steps == 3 * 640 / 64
    [smaller] = planned(file, 640, 512, f"output={tmp_path / 'run'}", "micro_batch_size=1").rows
    assert smaller.costs is not None
    assert smaller.costs.memory.allocated < row.costs.memory.allocated / 2
    config = json.dumps({**LLAMA, "vocab_size": 512})
    with pytest.raises(UserError, match="the adapter could not be loaded"):
        planned(file, 640, 512, f"workload.model={{config: {config}}}")


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


@pytest.mark.parametrize("kind", ["pretrain", "texts"])
@pytest.mark.parametrize("samples", [99_999_989, 10**9])  # a prime, and what would fill memory as a list
def test_any_number_of_samples_is_planned_from_a_few_made_ones(tmp_path: Path, kind: str, samples: int) -> None:
    file = run_file(tmp_path, {"pretrain": language(), "texts": texts(tmp_path)}[kind])
    with with_made_data(file, samples, 64) as made:
        data = json.loads(made.read_text())["workload"]["data"]
        assert Path(data["train"]).stat().st_size < 2**22
        plan = plan_as_asked(made, [[]], Traced(this_machine(catalogue())))
    assert plan.steps == 2 * -(-samples // 8)
    assert plan.rows[0].costs is not None
    assert plan.rows[0].costs.tokens == 8 * 64


def test_a_batch_may_be_larger_than_what_was_made(tmp_path: Path) -> None:
    file = run_file(tmp_path, language(model={"config": {**LLAMA, "max_position_embeddings": 2**15}}))
    with with_made_data(file, 1000, 2**15) as made:
        assert plan_as_asked(made, [["batch_size=20"]], Traced(this_machine(catalogue()))).steps == 2 * 50


def test_made_data_are_those_of_the_overridden_stage(tmp_path: Path) -> None:
    file = run_file(tmp_path, language(stage="sft", data={"train": "none.jsonl", "template": "plain"}))
    [row] = planned(file, 64, 32, "workload.stage=dpo").rows
    assert row.costs is not None, row.reason
    with pytest.raises(UserError, match="by itself"), with_made_data(file, 64, 32, ["workload.stage=sft,dpo"]):
        pass
    with with_made_data(file, 64, 32, ["engine=ddp,fsdp", "workload.model.attention=eager,sdpa"]) as made:
        assert "conversation" not in made.read_text()


STOPPED = """
import sys, time
from pathlib import Path
from drivetrain.plan.stand_ins import with_made_data
with with_made_data(Path(sys.argv[1]), 64, 32) as made:
    print(made.parent, flush=True)
    time.sleep(600)
"""


def test_made_data_that_a_termination_left_go_with_the_next_launch(tmp_path: Path) -> None:
    file = run_file(tmp_path, language())
    process = subprocess.Popen([sys.executable, "-c", STOPPED, str(file)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    left = Path(process.stdout.readline().strip())
    assert left.is_dir()
    process.send_signal(signal.SIGTERM)
    process.communicate()
    with scratch.make():
        assert not left.exists()
