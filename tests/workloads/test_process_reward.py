"""Process reward models: the loss of Transformers' token classifier, and steps learned by whether they are right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from drivetrain.config.load import validate
from drivetrain.workloads.language_model import LanguageModelWorkload
from drivetrain.workloads.loss_contract import LOSS, NO_CONTEXT
from drivetrain.workloads.process_reward import ProcessRewardWorkload
from tests.tiny_language import LLAMA, config, write_lines

Run = Callable[..., tuple[int, str, str]]
ROWS = [
    {
        "prompt": f"ask {n}",
        "completions": ["yes " * (n % 3 + 1), "no", "so"][: n % 3 + 1],
        "labels": [n % 2 == 0, n % 3 == 0, True][: n % 3 + 1],
    }
    for n in range(8)
]


def workload(folder: Path, packing: bool = True, rows: Any = None, **more: Any) -> ProcessRewardWorkload:
    path = write_lines(folder / "steps.jsonl", rows or ROWS)
    block = config(
        folder, stage="reward", train=path, template="plain", evaluation_fraction=0, packing=packing, **more
    ).model_dump()
    return ProcessRewardWorkload(
        type(config(folder, train=path)).model_validate({**block, "preference": {"loss": "steps"}}), 0
    )


@pytest.mark.parametrize("packing", [True, False])
def test_the_loss_is_that_of_transformers_token_classifier_with_trls_labels(tmp_path: Path, packing: bool) -> None:
    """Which takes the mean over all labelled tokens of a batch, as TRL's trainer did."""
    work = workload(tmp_path, packing)
    torch.manual_seed(0)
    model: Any = work.build_model().train()
    assert work.packs == packing
    model.save_pretrained(tmp_path / "saved")
    work.save_assets(model, tmp_path / "saved")
    batch = work.collate([work.train.load(index, 0) for index in range(len(ROWS))])
    sums, count = work.loss_sums(model, batch, NO_CONTEXT), work.counts(batch)
    assert count[LOSS] == sum(len(row["labels"]) for row in ROWS)
    loss = sums[LOSS] / count[LOSS]
    loss.backward()
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved")
    assert loaded.config.id2label == {0: "incorrect", 1: "correct"}
    assert type(loaded).__name__ in loaded.config.architectures
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    ids, labels = [], []
    for row in ROWS:
        own, marks = tokenizer(row["prompt"])["input_ids"], []
        marks = [-100] * len(own)
        for step, label in zip(row["completions"], row["labels"], strict=True):
            tokens = tokenizer(step)["input_ids"] + tokenizer("\n")["input_ids"]
            own, marks = own + tokens, marks + [-100] * (len(tokens) - 1) + [int(label)]
        ids.append(torch.tensor(own))
        labels.append(torch.tensor(marks))
    padded = [torch.nn.utils.rnn.pad_sequence(each, True, value) for each, value in ((ids, 0), (labels, -100))]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], True)
    theirs = loaded.eval()(input_ids=padded[0], labels=padded[1], attention_mask=mask).loss
    theirs.backward()
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-5)
    gradients = dict(loaded.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-6)


def test_a_head_drops_out_only_where_the_models_config_says_so(tmp_path: Path) -> None:
    assert workload(tmp_path).build_model().dropout.p == 0  # type: ignore[union-attr]
    sizes = {name: LLAMA[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    neox = {"model_type": "gpt_neox", "num_attention_heads": 4, **sizes, "classifier_dropout": 0.25}
    work = workload(tmp_path, model={"config": neox})
    assert work.build_model().dropout.p == 0.25  # type: ignore[union-attr]


def test_predictions_are_how_likely_each_step_is_right(tmp_path: Path) -> None:
    work = workload(tmp_path)
    model: Any = work.build_model().eval()
    samples = [work.train.load(index, 0) for index in range(len(ROWS))]
    rows = work.predict(model, work.collate(samples))
    for sample, row in zip(samples, rows, strict=True):
        alone = model(input_ids=torch.tensor(sample.own[0].astype("int64"))[None]).logits[0].softmax(1)[:, 1]
        expected = alone[torch.tensor(sample.own[1])].tolist()
        assert row["step_scores"] == pytest.approx(expected, abs=2e-6)
        assert (row["steps"], row["lowest_step_score"]) == (len(expected), min(row["step_scores"]))
    assert work.shown(samples[1]).startswith("wrong: ask 1yes yes \n\nwrong: no")


def run_file(folder: Path, rows: list[dict[str, Any]], **more: Any) -> str:
    data = {"train": write_lines(folder / "rows.jsonl", rows), "template": "plain", "length": 64}
    data["cache"] = str(folder / "cache")
    block = {"type": "language_model", "stage": "reward", "preference": {"loss": "steps"}, "model": {"config": LLAMA}}
    run = {
        "workload": {**block, "data": data},
        "batch_size": 12,
        "loop": {"epochs": 4},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "output": str(folder / "run"),
        **more,
    }
    (folder / "run.json").write_text(json.dumps(run))
    return str(folder / "run.json")


def sums(count: int) -> list[dict[str, Any]]:
    """Answers of two steps, which are right where they repeat the prompt's letter."""
    letters = "abcd"
    rows = []
    for n in range(count):
        own, other = letters[n % 4], letters[(n + 1 + n // 4 % 3) % 4]
        rows.append(
            {"prompt": f"{n} {own}", "completions": [own, own if n % 3 else other], "labels": [True, bool(n % 3)]}
        )
    return rows


@pytest.mark.long
def test_a_process_reward_model_learns_which_steps_are_right_and_a_cut_run_goes_on_to_the_bit(
    drivetrain: Run, tmp_path: Path
) -> None:
    """A sixth of all steps is wrong: calling all of them right would be an accuracy of 0.83 and an F1 of 0.45."""
    path = run_file(tmp_path, sums(400), checkpoints={"every_steps": 60, "keep_last": 9})
    code, _, words = drivetrain("train", path, "--quiet")
    assert code == 0, words
    metrics = json.loads((tmp_path / "run" / "report.json").read_text())["metrics"]
    assert metrics["step_accuracy"] > 0.97
    assert metrics["step_f1"] > 0.95
    last = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    whole = (last / "model.safetensors").read_bytes()
    for each in (tmp_path / "run" / "checkpoints").glob("step-*"):
        if each.name != "step-00000060":
            for file in each.iterdir():
                file.unlink()
            each.rmdir()
    code, _, words = drivetrain("train", path, "--quiet", "--resume")
    assert code == 0, words
    assert (last / "model.safetensors").read_bytes() == whole
    code, out, words = drivetrain("predict", path, "--output", str(tmp_path / "out.jsonl"))
    assert code == 0, words
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 40
    assert all(len(row["step_scores"]) == 2 for row in rows)
    code, out, words = drivetrain("data", path)
    assert code == 0, words
    [steps, right] = re.findall(r"steps ([\d,]+), of which ([\d,]+) are marked as right", " ".join(out.split()))[0]
    assert int(steps) == 720
    assert abs(int(right) - 600) < 15, "a third of the answers has a wrong one; a tenth is held out"


@pytest.mark.long
@pytest.mark.parametrize("loss", ["steps", "bradley_terry"])
def test_an_adapter_that_scores_is_exported_as_what_transformers_scores_with(
    drivetrain: Run, tmp_path: Path, loss: str
) -> None:
    base = LanguageModelWorkload(config(tmp_path, [{"instruction": "a", "output": "b"}]), 0)
    base.build_model().save_pretrained(tmp_path / "base")  # type: ignore[operator]
    base.tokenizer.save_pretrained(tmp_path / "base")
    rows = sums(60)
    if loss == "bradley_terry":
        rows = [{"prompt": row["prompt"], "chosen": "yes", "rejected": "never"} for row in rows]
    model, adapter = {"path": str(tmp_path / "base")}, {"method": "lora", "rank": 4}
    path = run_file(tmp_path, rows, adapter=adapter, loop={"epochs": 1})
    given = [path, f"workload.preference.loss={loss}", f"workload.model={json.dumps(model)}", "--quiet"]
    code, _, words = drivetrain("train", *given)
    assert code == 0, words
    code, _, words = drivetrain(
        "export", str(tmp_path / "run"), "--to", "transformers", "--output", str(tmp_path / "e")
    )
    assert code == 0, words
    kind = AutoModelForTokenClassification if loss == "steps" else AutoModelForSequenceClassification
    loaded = kind.from_pretrained(tmp_path / "e")
    labels = {0: "incorrect", 1: "correct"} if loss == "steps" else {0: "reward"}
    assert loaded.config.id2label == labels
    assert loaded.config.pad_token_id == base.tokenizer.eos_token_id


def test_a_loss_of_steps_goes_with_no_other_and_its_separator_with_no_other_loss() -> None:
    def problems(**preference: Any) -> str:
        block = {"type": "language_model", "stage": "reward", "model": {"path": "a/b"}, "data": {"train": "a/b"}}
        run = {"workload": {**block, "preference": preference}, "batch_size": 2, "loop": {"steps": 1}}
        made, found = validate(run, [])
        assert made is not None
        listed = [*found, *made.workload.problems(made)]
        return " ".join(map(str, listed))

    assert "give one of them alone" in problems(loss=["steps", "bradley_terry"])
    assert "the loss bradley_terry has none" in problems(step_separator=";")
    assert "the loss steps has none" in problems(loss="steps", centring=0.1)
    assert "workload.preference" not in problems(loss="steps", step_separator=";")
