"""Whole runs that train adapters: what they tell and leave, how they go on, what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, ViTConfig, ViTForImageClassification

from drivetrain.checkpoint.directory import load
from drivetrain.checkpoint.state import same
from drivetrain.config.files import read_yaml
from tests.tiny_language import LLAMA, ROWS, write_lines

Command = Callable[..., tuple[int, str, str]]
RUN = """
workload:
  type: language_model
  stage: sft
  model: {{path: {base}}}
  data: {{train: {rows}, template: plain, length: 64, cache: {cache}}}
adapter: {{rank: 4, dropout: 0.1}}
batch_size: 6
loop: {{steps: 8, max_grad_norm: 1.0}}
optimizer: {{name: adamw, lr: 1.0e-2}}
evaluation: {{every_steps: 4}}
checkpoints: {{keep_last: 3}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base that was trained for two steps, and the run file of an adapter of it."""
    from drivetrain.cli import main

    folder = tmp_path_factory.mktemp("adapters")
    rows = write_lines(folder / "rows.jsonl", ROWS)
    made = json.dumps({"config": LLAMA})
    data = json.dumps({"train": rows, "template": "plain", "length": 64, "cache": str(folder / "cache")})
    (folder / "base.yaml").write_text(
        f"workload: {{type: language_model, stage: sft, model: {made}, data: {data}}}\n"
        "batch_size: 6\nloop: {steps: 2}\n"
    )
    with pytest.raises(SystemExit):
        main(["train", str(folder / "base.yaml"), f"output={folder}/base", "--quiet"])
    base = folder / "base" / "checkpoints" / "step-00000002"
    (folder / "run.yaml").write_text(RUN.format(base=base, rows=rows, cache=folder / "cache"))
    return folder


def checkpoint(run: Path, step: int = 8) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def test_a_run_tells_what_is_trained_and_lowers_the_loss(folder: Path, drivetrain: Command) -> None:
    code, out, _ = drivetrain(
        "train", f"{folder}/run.yaml", f"output={folder}/told", "loop.steps=40", "optimizer.lr=0.03"
    )
    assert code == 0
    base = AutoModelForCausalLM.from_pretrained(folder / "base" / "checkpoints" / "step-00000002")
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained, total = theirs.get_nb_trainable_parameters()
    report = json.loads((folder / "told" / "report.json").read_text())
    assert (report["engaged"]["trained_parameters"], report["engaged"]["global_parameters"]) == (trained, total)
    assert f"{trained:,} of {total:,}" in out
    events = [json.loads(line) for line in (folder / "told" / "events.jsonl").read_text().splitlines()]
    losses = [event["metrics"]["loss"] for event in events if event["event"] == "evaluation"]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["quantised_base={format: nf4}"],
        pytest.param(
            ["quantised_base={format: int8}", "adapter={rank: 128}", "optimizer.name=adamw8bit"], marks=pytest.mark.slow
        ),
        pytest.param(["adapter={pissa: true}", "precision=bf16-mixed"], marks=pytest.mark.slow),
        ["adapter=[{name: one}, {name: two, targets: [q_proj]}]"],
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_a_run_that_goes_on_ends_with_the_same_bits(settings: list[str], folder: Path, drivetrain: Command) -> None:
    file, name = f"{folder}/run.yaml", "".join(filter(str.isalnum, "".join(settings)))
    whole, parts = folder / f"whole{name}", folder / f"parts{name}"
    assert drivetrain("train", file, f"output={whole}", *settings, "--quiet")[0] == 0
    assert drivetrain("train", file, f"output={parts}", "loop.steps=4", *settings, "--quiet")[0] == 0
    assert drivetrain("train", file, f"output={parts}", "--resume", *settings, "--quiet")[0] == 0
    at_once, gone_on = load(checkpoint(whole)), load(checkpoint(parts))
    assert same(at_once["model"], gone_on["model"])
    assert same(at_once["optimizer"], gone_on["optimizer"])


def test_the_report_has_the_bytes_of_each_kind_of_tensor(folder: Path, drivetrain: Command) -> None:
    """4-bit codes and their scales, fp32 for the rest, two fp32 moments and a counter a trained tensor."""
    code, _, _ = drivetrain(
        "train", f"{folder}/run.yaml", f"output={folder}/bytes", "quantised_base={format: nf4}", "--quiet"
    )
    assert code == 0
    report = json.loads((folder / "bytes" / "report.json").read_text())
    weights = load_file(folder / "base" / "checkpoints" / "step-00000002" / "model.safetensors")
    small = sum(t.numel() for name, t in weights.items() if name.endswith("_proj.weight"))
    rest = sum(t.numel() for name, t in weights.items() if not name.endswith("_proj.weight"))
    trained = load_file(checkpoint(folder / "bytes") / "model.safetensors")
    numbers = sum(t.numel() for t in trained.values())
    held = report["ranks"][0]["held_bytes"]
    assert held["frozen"] == pytest.approx(small * (1 / 2 + 1 / 64 + 4 / (64 * 256)) + 4 * rest, rel=0.05)
    assert held["trained"] == held["gradients"] == 4 * numbers
    assert held["optimizer"] == 8 * numbers + 4 * len(trained)
    assert report["engaged"]["global_parameters"] == small + rest + numbers


def test_a_checkpoint_is_small_and_loads_into_plain_peft_and_transformers(folder: Path, drivetrain: Command) -> None:
    assert drivetrain("train", f"{folder}/run.yaml", f"output={folder}/small", "--quiet")[0] == 0
    saved = checkpoint(folder / "small")
    weights = load_file(saved / "model.safetensors")
    assert all(".lora_" in name for name in weights)
    base = folder / "base" / "checkpoints" / "step-00000002"
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(saved)).eval()
    ids = AutoTokenizer.from_pretrained(saved)("say 3", return_tensors="pt").input_ids
    directly = AutoModelForCausalLM.from_pretrained(saved).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=ids).logits, directly(input_ids=ids).logits)
    assert not torch.equal(
        theirs(input_ids=ids).logits, AutoModelForCausalLM.from_pretrained(base).eval()(input_ids=ids).logits
    )


def test_a_run_goes_on_with_the_adapter_of_another_runs_folder(folder: Path, drivetrain: Command) -> None:
    file = f"{folder}/run.yaml"
    assert drivetrain("train", file, f"output={folder}/first", "name=first", "--quiet")[0] == 0
    best = (folder / "first" / "best").resolve()
    for name, path in (("by-run", folder / "first"), ("by-step", best)):
        words = (f"adapter={{path: {path}}}", f"output={folder}/{name}", "name=on", "loop.steps=2", "--quiet")
        code, _, err = drivetrain("train", file, *words)
        assert code == 0, err
    written = read_yaml(folder / "by-run" / "run.yaml")
    assert written["adapter"][0]["path"] == f"{folder}/first/checkpoints/{best.name}"
    found = [load_file(checkpoint(folder / name, 2) / "adapter_model.safetensors") for name in ("by-run", "by-step")]
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())
    saved = load_file(best / "adapter_model.safetensors")
    far, near = (max(float((a[key] - saved[key]).abs().max()) for key in saved) for a in (zero(saved), found[0]))
    assert near < far / 2, "it began at the other run's numbers"


def zero(saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: torch.zeros_like(value) for key, value in saved.items()}


def test_evaluation_and_prediction_use_the_adapter(folder: Path, drivetrain: Command) -> None:
    file = f"{folder}/run.yaml"
    assert drivetrain("train", file, f"output={folder}/used", "--quiet")[0] == 0
    report = json.loads((folder / "used" / "report.json").read_text())
    code, out, _ = drivetrain("evaluate", file, f"output={folder}/used", "--checkpoint", "last")
    assert code == 0
    assert json.loads(out)["metrics"]["loss"] == pytest.approx(report["metrics"]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["adapter.rank=0"], "adapter.rank: 0 was given"),
        (["adapter.ranks=4"], "did you mean rank"),
        (["adapter={method: prompt, rank: 4}"], "it is of lora, and adapter.method is prompt"),
        (["adapter={targets: [q_porj]}"], "did you mean q_proj"),
        (["adapter={path: nowhere}"], "nowhere holds no adapter_config.json"),
        (["adapter=[{name: a}, {name: a}]"], "two adapters have the same name"),
        (["adapter=[lora, {method: ia3, name: b}]"], "several adapters of different methods"),
        (["adapter={dora: true, pissa: true}"], "give one of dora and pissa"),
        (["adapter={method: prompt, train_also: [lm_head]}"], "trains virtual tokens and a classifier's head"),
        (["adapter={targets: ['']}"], "should have at least 1 character"),
        (["adapter=prefix", "recompute=true"], "would see the prefix twice"),
        (["engine={name: mesh, tp: 2}", "adapter={dora: true}"], "adapter.dora: DoRA measures whole rows of weights"),
        (["engine={name: mesh, pp: 2}", "adapter=prompt"], "virtual tokens are put before those"),
        (
            ["data.length=120", "adapter={method: prompt}"],
            "(120 + 20 virtual tokens) > the model's context (128",
        ),
        (["model.train_last_blocks=1"], "adapters freeze all blocks"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(
    settings: list[str], words: str, folder: Path, drivetrain: Command
) -> None:
    code, _, err = drivetrain("train", f"{folder}/run.yaml", f"output={folder}/refused", *settings)
    assert code == 2
    assert words in err
    assert not (folder / "refused").exists()


def test_the_same_weights_are_not_used_for_something_else(folder: Path, drivetrain: Command) -> None:
    file = f"{folder}/run.yaml"
    assert drivetrain("train", file, f"output={folder}/scaled", "loop.steps=4", "--quiet")[0] == 0
    for verb in (["evaluate", "--checkpoint", "last"], ["train", "--resume"]):
        code, _, err = drivetrain(
            *verb[:1], file, f"output={folder}/scaled", "adapter={rank: 4, alpha: 100}", *verb[1:]
        )
        assert code == 2
        assert "adapter.alpha: 8.0 in" in err
    code, _, err = drivetrain("train", file, f"output={folder}/scaled", "--resume", "quantised_base=nf4", "--quiet")
    assert code == 0
    events = (folder / "scaled" / "events.jsonl").read_text()
    assert "was trained over a whole base, and works over a base in nf4 here" in events


@pytest.mark.slow
def test_a_proof_counts_the_weights_of_a_quantised_base(folder: Path, drivetrain: Command) -> None:
    code, out, _ = drivetrain("prove", f"{folder}/run.yaml", "engine=fsdp", "processes=2", "quantised_base=nf4")
    assert code == 0, out


def test_an_adapter_of_a_model_made_at_random_is_refused(folder: Path, drivetrain: Command) -> None:
    code, _, err = drivetrain("train", f"{folder}/base.yaml", f"output={folder}/refused", "adapter=lora")
    assert code == 2
    assert "starts at random: the adapter could not be loaded without it" in err


def test_a_checkpoint_is_refused_where_the_base_has_changed(folder: Path, drivetrain: Command) -> None:
    file = f"{folder}/run.yaml"
    assert drivetrain("train", file, f"output={folder}/moved", "loop.steps=4", "--quiet")[0] == 0
    base = folder / "base" / "checkpoints" / "step-00000002"
    other: Any = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    other.save_pretrained(folder / "other")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "other")
    code, _, err = drivetrain("train", file, f"output={folder}/moved", f"model.path={folder}/other", "--resume")
    assert code == 2
    assert "whose weights are other ones" in err


METHODS_OF_PARITY = ("p-tuning", "ia3", "{dora: true}", "{lr_ratio: 16}")  # tests/parity has the curves of these


@pytest.mark.parametrize(
    "adapter", ["prompt", "prefix", *(pytest.param(each, marks=pytest.mark.slow) for each in METHODS_OF_PARITY)]
)
def test_each_method_lowers_the_loss_and_goes_on_exactly(adapter: str, folder: Path, drivetrain: Command) -> None:
    output = folder / f"method-{''.join(filter(str.isalnum, adapter))}"
    common = [f"{folder}/run.yaml", f"output={output}", f"adapter={adapter}", "optimizer.lr=0.03", "--quiet"]
    assert drivetrain("train", *common, "loop.steps=4")[0] == 0
    first = json.loads((output / "report.json").read_text())["metrics"]["loss"]
    assert drivetrain("train", *common, "loop.steps=24", "--resume")[0] == 0
    assert json.loads((output / "report.json").read_text())["metrics"]["loss"] < first


PICTURES = """
workload:
  type: image_classification
  model: {{path: {base}}}
  data: {{source: digits, evaluation_fraction: 0.2, image_size: 16}}
adapter: {{dora: true, targets: [projection, fc1]}}
batch_size: 32
loop: {{steps: 2}}
optimizer: {{name: adamw, lr: 1.0e-3}}
"""


def test_an_adapted_convolution_trains_and_its_runs_own_file_evaluates_it(tmp_path: Path, drivetrain: Command) -> None:
    """DoRA looks at filters as rows, which channels-last ones are not."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = ViTConfig(**sizes, image_size=16, patch_size=8, num_channels=1, num_labels=10)
    ViTForImageClassification(config).save_pretrained(tmp_path / "base")
    (tmp_path / "run.yaml").write_text(PICTURES.format(base=tmp_path / "base"))
    assert drivetrain("train", str(tmp_path / "run.yaml"), f"output={tmp_path / 'out'}")[0] == 0
    code, out, err = drivetrain("evaluate", str(tmp_path / "out" / "run.yaml"))
    assert (code, '"accuracy"' in out) == (0, True), err
