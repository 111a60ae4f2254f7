"""Whole runs of quantisation-aware training: what they tell and leave, how they go on, and the model quantised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from drivetrain.checkpoint.directory import load
from drivetrain.checkpoint.state import same
from drivetrain.config.load import load as load_run
from drivetrain.runtime.library_messages import hush
from drivetrain.workloads.build import build_workload
from tests.test_docs import ROOT, blocks
from tests.tiny_language import LLAMA, ROWS, write_lines

pytest.importorskip("torchao")
pytest.importorskip("peft")
Command = Callable[..., tuple[int, str, str]]
RUN = """
workload:
  type: language_model
  stage: sft
  model: {model}
  data: {{train: {rows}, template: plain, length: 64, cache: {cache}}}
quantisation_aware: {{format: int4-weight}}
batch_size: 6
loop: {{steps: 4}}
optimizer: {{name: adamw, lr: 1.0e-2}}
evaluation: {{every_steps: 2}}
checkpoints: {{keep_last: 3}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all weights, and the run file of an adapter above what it leaves."""
    from drivetrain.cli import main

    folder = tmp_path_factory.mktemp("quantised")
    rows = write_lines(folder / "rows.jsonl", ROWS)
    (folder / "run.yaml").write_text(RUN.format(model=json.dumps({"config": LLAMA}), rows=rows, cache=folder / "cache"))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(folder / "run.yaml"), f"output={folder}/all", "--quiet"])
    assert not ended.value.code
    base = RUN.format(model=json.dumps({"path": str(last(folder / "all"))}), rows=rows, cache=folder / "cache")
    (folder / "lora.yaml").write_text(f"{base}adapter: {{rank: 4, dropout: 0.1}}\n")
    return folder


def last(run: Path) -> Path:
    return run / "checkpoints" / "step-00000004"


def shown(number: int, folders: dict[str, Path], **names: Any) -> dict[str, Any]:
    """Returns what the page's block of Python leaves, with folders of this test in place of its own."""
    hush()
    from peft import PeftModel
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    code = blocks((ROOT / "docs" / "how-to" / "quantisation.md").read_text(), "python")[number]
    for before, path in folders.items():
        assert before in code
        code = code.replace(before, str(path))
    found: dict[str, Any] = {"Path": Path, "json": json, "torch": torch, "AutoModelForCausalLM": AutoModelForCausalLM}
    found |= {"PeftModel": PeftModel, "quantize_": quantize_, "PerGroup": PerGroup, **names}
    found["IntxWeightOnlyConfig"] = IntxWeightOnlyConfig
    exec(code, found)
    return found


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(40)[None] * 7 % 250).logits


def as_trained(file: Path, checkpoint: Path) -> nn.Module:
    """The model that a run of this file evaluates."""
    run, problems = load_run(file)
    assert run is not None, problems
    model = build_workload(run.workload, run.seed, run.adapter, None, run.quantisation_aware).build_model()
    weights = load(checkpoint)["model"]
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    return model


def test_a_run_says_what_it_rounds_and_leaves_plain_weights(folder: Path) -> None:
    report = json.loads((folder / "all" / "report.json").read_text())
    assert report["engaged"]["linear_layers"] == "14 of 15 fake-quantised (int4-weight)"
    model = AutoModelForCausalLM.from_pretrained(last(folder / "all"))
    saved = load(last(folder / "all"))["model"]
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], weight) for name, weight in model.state_dict().items())


def test_the_pages_three_lines_make_the_model_that_was_evaluated(folder: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(last(folder / "all"))
    quantised = shown(0, {"runs/my-run/checkpoints/step-00000100": last(folder / "all")})["model"]
    trained = as_trained(folder / "run.yaml", last(folder / "all"))
    assert torch.equal(logits(quantised), logits(trained))
    assert not torch.allclose(logits(quantised), logits(plain), atol=1e-4)


@pytest.mark.parametrize("file", ["run.yaml", "lora.yaml"])
def test_a_run_that_goes_on_ends_with_the_same_bits(file: str, folder: Path, drivetrain: Command) -> None:
    whole, parts = folder / f"whole-{file}", folder / f"parts-{file}"
    assert drivetrain("train", f"{folder}/{file}", f"output={whole}", "--quiet")[0] == 0
    assert drivetrain("train", f"{folder}/{file}", f"output={parts}", "loop.steps=2", "--quiet")[0] == 0
    assert drivetrain("train", f"{folder}/{file}", f"output={parts}", "--resume", "--quiet")[0] == 0
    at_once, gone_on = load(last(whole)), load(last(parts))
    assert same(at_once["model"], gone_on["model"])
    assert same(at_once["optimizer"], gone_on["optimizer"])


def test_the_base_under_an_adapter_is_quantised_as_the_page_has_it(folder: Path, drivetrain: Command) -> None:
    adapter = folder / "adapter"
    assert drivetrain("train", f"{folder}/lora.yaml", f"output={adapter}", "--quiet")[0] == 0
    layers = json.loads((last(adapter) / "quantisation_aware.json").read_text())["layers"]
    assert len(layers) == 14
    assert "model.layers.0.self_attn.q_proj" in layers
    names = {"folder": last(adapter), "layers": layers}
    quantised = shown(1, {"models/my-model": last(folder / "all")}, **names)["model"]
    trained = as_trained(folder / "lora.yaml", last(adapter))
    torch.testing.assert_close(logits(quantised), logits(trained), rtol=1e-5, atol=1e-6)
