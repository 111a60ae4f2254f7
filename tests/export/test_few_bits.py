"""Exports in 4 bits: plain Transformers loads them, and their weights are the nearest of the published formats."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import drivetrain as api
from drivetrain.config.load import load
from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError
from drivetrain.export import request as asked
from drivetrain.export.exporting import export
from drivetrain.export.request import Request
from drivetrain.launch.prepare import run_file_of
from drivetrain.models.int4_export import best_scales
from tests.tiny_language import ROWS, write_lines

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

# inputs of the last layer of each block are no whole number of groups
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 64}


def trained(folder: Path, config: dict[str, Any]) -> RunConfig:
    data = {"train": write_lines(folder / "rows.jsonl", ROWS), "template": "alpaca", "length": 64}
    workload = {"type": "language_model", "stage": "sft", "model": {"config": config}, "data": data}
    api.train({"workload": workload}, batch_size=8, steps=2, lr=1e-3, quiet=True, output=folder / "run")
    found, problems = load(*run_file_of(folder / "run", []))
    assert found is not None
    assert not problems
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return trained(tmp_path_factory.mktemp("few"), LLAMA)


def rounded(weight: Tensor, scales: Tensor) -> Tensor:
    groups = weight.unflatten(-1, (-1, 32))
    return ((groups / scales[..., None]).round().clamp(-8, 7) * scales[..., None]).flatten(-2)


@pytest.mark.parametrize("numbers", ["int4", pytest.param("nf4", marks=pytest.mark.long)])
def test_a_model_in_four_bits_answers_in_plain_transformers_within_its_bound(
    run: RunConfig, numbers: str, tmp_path: Path
) -> None:
    done = export(run, Request("transformers", tmp_path / "out", quantise=numbers, dtype="bf16", samples=2))
    assert done.report["passed"]
    assert 1e-3 < done.verdict.difference.relative < 0.6, "four bits are not the run's own weights"
    others = {"int4": 1, "nf4": 5}[numbers]
    assert any(f"_proj and {others} more is not in" in note for note in done.report["notes"])
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == {"int4": "compressed-tensors", "nf4": "bitsandbytes"}[numbers]
    if numbers == "int4":
        assert settings["config_groups"]["group_0"]["format"] == settings["format"] == "pack-quantized"
        assert settings["ignore"] == [*(f"model.layers.{n}.mlp.down_proj" for n in (0, 1)), "lm_head"]


@pytest.mark.long
@pytest.mark.parametrize("numbers", ["int8", "int4"])
def test_no_message_of_a_library_stands_among_the_lines_of_an_export(
    run: RunConfig, numbers: str, tmp_path: Path
) -> None:
    """In a process of its own, which imports torchao or compressed-tensors for the first time."""
    command = [sys.executable, "-m", "drivetrain", "export", str(run.folder), "--to", "transformers"]
    command += ["--quantise", numbers, "--samples", "2", "--accept", "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    begins = ("reading ", "asking ", "writing ", "note ", "verified: ", "accepted ", "kept ")
    assert [line for line in done.stderr.splitlines() if not line.startswith(begins)] == []


def test_weights_in_int4_are_whole_multiples_of_their_groups_scale(run: RunConfig, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    export(run, Request("transformers", tmp_path / "out", quantise="int4", samples=1))
    name = "model.layers.1.mlp.up_proj"
    file = load_file(tmp_path / "out" / "model.safetensors")
    assert file[f"{name}.weight_packed"].dtype == torch.int32
    assert file[f"{name}.weight_packed"].shape == (72, 64 // 8)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loaded(torch.arange(4)[None])  # compressed-tensors unpacks at the first pass
    weight = api.load(run.folder).get_parameter(f"{name}.weight").detach()
    torch.testing.assert_close(loaded.get_parameter(f"{name}.weight"), rounded(weight, best_scales(weight)))


def test_a_groups_scale_leaves_a_smaller_error_than_the_one_of_its_largest_weight() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 128)
    weight[0] = 0
    scales = best_scales(weight)
    of_largest = (weight.unflatten(-1, (-1, 32)).abs().amax(-1) / 7.5).clamp(min=1e-30)
    errors = [(rounded(weight, each) - weight).square().sum().item() for each in (scales, of_largest)]
    assert errors[0] < 0.93 * errors[1]
    assert torch.isfinite(rounded(weight, scales)).all()


@pytest.mark.parametrize("numbers", ["int4", "nf4", "int8"])
def test_a_model_without_linear_layers_is_refused_in_few_bits(
    numbers: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = trained(tmp_path_factory.mktemp("gpt2"), GPT2)
    with pytest.raises(UserError, match=f"(?s)no linear layers.*{numbers}.*give --to gguf"):
        export(run, Request("transformers", tmp_path / "out", quantise=numbers))
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_missing_is_named_before_any_work(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"--quantise: int4 needs compressed_tensors(.|\n)*drivetrain\[int4\]"):
        export(run, Request("transformers", tmp_path / "out", quantise="int4"))
