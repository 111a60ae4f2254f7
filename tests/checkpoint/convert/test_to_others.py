"""Checkpoints of ours in others' formats: their own software reads them, and goes on as ours does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_model
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from drivetrain.checkpoint.directory import load
from tests.checkpoint.convert.net import Net
from tests.checkpoint.convert.scripts import DECAY, END, FLAT, RATE, adamw, load_universal
from tests.ranks import RankPool
from tests.tiny_language import LLAMA, ROWS, write_lines

Command = Callable[..., tuple[int, str, str]]


def converted(drivetrain: Command, path: Path, form: str, output: Path, *more: str) -> str:
    """Returns the report of it."""
    code, out, err = drivetrain("checkpoint", "convert", str(path), "--to", form, "--output", str(output), *more)
    assert code == 0, err
    assert output.is_dir()
    assert not list(output.parent.glob(".*partial*"))
    return out


def same_as(run: Path, model: Net, optimizer: torch.optim.Optimizer) -> None:
    """To the bit: weights, buffer, moments, counters."""
    saved = load(run / "checkpoints" / f"step-{END:08d}")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved["model"][name]), name
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert state.keys() == saved["optimizer"]["state"].keys()
    for name, values in saved["optimizer"]["state"].items():
        for key, value in values.items():
            assert torch.equal(state[name][key], value), (name, key)


@pytest.mark.parametrize("options", [None, FLAT], ids=["groups", "flattened"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_distributed_checkpoint_loads_model_and_optimizer_by_their_names(
    drivetrain: Command, run: Path, tmp_path: Path, options: Any
) -> None:
    words = converted(drivetrain, run, "dcp", tmp_path / "theirs")
    model = Net()
    optimizer = adamw(model)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "train_state": {"step": 0},
    }
    dcp.load(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    same_as(run, model, optimizer)
    assert state["train_state"]["step"] == END
    assert "left\trandom states" in words


def test_accelerate_loads_what_it_would_have_saved(drivetrain: Command, run: Path, tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    converted(drivetrain, run, "accelerate", tmp_path / "theirs")
    try:
        accelerator = Accelerator(cpu=True)
        model, optimizer = Net(), None
        model, optimizer = accelerator.prepare(model, adamw(model))
        accelerator.load_state(str(tmp_path / "theirs"))
        same_as(run, accelerator.unwrap_model(model), optimizer.optimizer)
    finally:
        AcceleratorState._reset_state(True)
    saved = load(run / "checkpoints" / f"step-{END:08d}")["training"]["generators"][0]
    assert torch.equal(torch.get_rng_state(), saved["torch"])


def test_deepspeed_loads_a_universal_checkpoint_on_two_ranks(
    drivetrain: Command, run: Path, tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    words = converted(drivetrain, run, "deepspeed", tmp_path / "theirs")
    saved = load(run / "checkpoints" / f"step-{END:08d}")
    weights, state = saved["model"], saved["optimizer"]["state"]
    for stage, found in ranks(2).run(load_universal, tmp_path / "theirs")[0].items():
        assert found["step"] == END
        for name, moments in state.items():
            assert torch.equal(found[name]["weight"], weights[name]), (stage, name)
            assert torch.equal(found[name]["exp_avg"], moments["exp_avg"]), (stage, name)
            assert torch.equal(found[name]["exp_avg_sq"], moments["exp_avg_sq"]), (stage, name)
        assert found["updates"] == END, stage
        assert found["rates"] == [(RATE, DECAY), (RATE, 0.0)], stage
    assert "weight_decay differ between groups" in words
    assert "1 lie in module" in words


LANGUAGE = """
workload:
  type: language_model
  stage: sft
  model: {{config: {llama}}}
  data: {{train: {rows}, template: chatml, length: 64, cache: {cache}}}
batch_size: 4
loop: {{steps: 2}}
optimizer: {{name: adamw, lr: 0.01}}
"""


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from drivetrain.cli import main

    folder = tmp_path_factory.mktemp("language")
    rows = write_lines(folder / "rows.jsonl", ROWS)
    llama = json.dumps({**LLAMA, "tie_word_embeddings": True})
    (folder / "run.yaml").write_text(LANGUAGE.format(llama=llama, rows=rows, cache=folder / "cache"))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(folder / "run.yaml"), f"output={folder / 'out'}", "--quiet"])
    assert ended.value.code == 0
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as-it-is", "bf16"])
def test_transformers_reads_weights_configuration_and_tokenizer(
    drivetrain: Command, language: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    asked = [] if dtype == torch.float32 else ["--dtype", "bf16"]
    words = converted(drivetrain, language / "out", "transformers", tmp_path / "theirs", *asked)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    saved = load(language / "out" / "checkpoints" / "step-00000002")["model"]
    assert model.dtype == dtype
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[name].to(dtype)), name
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(AutoTokenizer.from_pretrained(tmp_path / "theirs")) == model.config.vocab_size
    assert ("rounded" in words) == bool(asked)


def test_a_transformers_folder_comes_back_as_the_start_of_a_run(
    drivetrain: Command, language: Path, tmp_path: Path
) -> None:
    saved = load(language / "out" / "checkpoints" / "step-00000002")["model"]
    converted(drivetrain, language / "out", "transformers", tmp_path / "theirs")
    file, output = str(language / "run.yaml"), f"output={tmp_path / 'back'}"
    code, out, err = drivetrain("checkpoint", "convert", str(tmp_path / "theirs"), "--run", file, output)
    assert code == 0, err
    back = load(tmp_path / "back" / "checkpoints" / "step-00000000")["model"]
    assert back.keys() == saved.keys()
    assert all(torch.equal(back[name], saved[name]) for name in saved)
    assert "left\toptimizer's states\tthere are none: they begin anew" in out
    code, _, err = drivetrain("train", file, output, "--resume", "--quiet")
    assert code == 0, err


def test_a_tied_weight_is_written_once_and_loaded_under_both_names(
    drivetrain: Command, language: Path, tmp_path: Path
) -> None:
    converted(drivetrain, language / "out", "accelerate", tmp_path / "accelerate")
    words = converted(drivetrain, language / "out", "deepspeed", tmp_path / "deepspeed")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(language / "out/checkpoints/step-00000002"))
    load_model(model, tmp_path / "accelerate" / "model.safetensors")  # what accelerate calls; strict
    saved = load(language / "out" / "checkpoints" / "step-00000002")["model"]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    assert "buffers" not in words


def test_a_large_model_is_cut_into_files_that_transformers_joins(
    drivetrain: Command, language: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drivetrain.checkpoint.convert import transformers_folder

    monkeypatch.setattr(transformers_folder, "LARGEST_FILE", 20_000)
    converted(drivetrain, language / "out", "transformers", tmp_path / "theirs")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 2
    saved = load(language / "out" / "checkpoints" / "step-00000002")["model"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    weights = transformers_folder.read_weights(tmp_path / "theirs")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights.items())


def test_a_model_of_no_transformers_is_not_written_as_one(drivetrain: Command, run: Path, tmp_path: Path) -> None:
    code, _, err = drivetrain("checkpoint", "convert", str(run), "--to", "transformers", "-o", str(tmp_path / "theirs"))
    assert code == 2
    assert "no config.json" in err
    assert not list(tmp_path.iterdir())
