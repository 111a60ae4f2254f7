"""Blocks that are added to a model: without effect at first, trained alone, and a model that Transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drivetrain.errors import UserError
from drivetrain.models.block_expansion import add_blocks
from tests.tiny_language import LLAMA, ROWS, write_lines

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 99}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4},
    "gpt2": {},
}
IDS = torch.arange(24).view(2, 12) * 5 % 99


def made(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_added_blocks_change_nothing_at_first_and_are_trained_alone(kind: str, tmp_path: Path) -> None:
    model = made(kind)
    with torch.no_grad():
        before = model(input_ids=IDS).logits
    trained = add_blocks(model, 2)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=0, atol=0)
        whole = model.generate(IDS, max_new_tokens=6, do_sample=False, use_cache=False)
        assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), whole), "the cache has their places"
    model(input_ids=IDS, labels=IDS).loss.backward()
    own = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == sum(p.numel() for p in model.parameters() if p.grad is not None)
    assert {next(part for part in name.split(".") if part.isdigit()) for name in own} == {"2", "5"}
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.num_hidden_layers == 6
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=IDS).logits, before)


def test_a_number_that_does_not_divide_the_blocks_is_refused() -> None:
    with pytest.raises(UserError, match=r"add_blocks: 3 blocks were asked for, and LlamaForCausalLM has 4 blocks"):
        add_blocks(made("llama"), 3)


def test_a_copy_that_would_have_an_effect_is_refused() -> None:
    model = made("llama")
    for layer in model.model.layers:
        layer.mlp.last = layer.mlp.down_proj
        del layer.mlp.down_proj
        layer.mlp.forward = lambda x, mlp=layer.mlp: mlp.last(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    with pytest.raises(UserError, match=r"still has an effect"):
        add_blocks(model, 2)


def test_a_run_trains_them_and_goes_on(drivetrain: Any, tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", ROWS)
    run = {
        "workload": {
            "type": "language_model",
            "stage": "sft",
            "model": {"config": LLAMA, "add_blocks": 2},
            "data": {"train": str(rows), "template": "plain", "length": 64, "cache": str(tmp_path / "cache")},
        },
        "batch_size": 6,
        "loop": {"steps": 4},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "checkpoints": {"every_steps": 2},
        "tracking": {"log_every": 1},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    for name, *more in (("whole",), ("parts", "loop.steps=2"), ("parts", "--resume")):
        code, _, words = drivetrain("train", str(tmp_path / "run.yaml"), f"output={tmp_path / name}", "--quiet", *more)
        assert code == 0, words
    newest = [max((tmp_path / name / "checkpoints").glob("step-*")) for name in ("whole", "parts")]
    whole, parts = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in newest)
    assert (
        max(int(part) for name in whole for part in name.split(".") if part.isdigit()) == 1 + LLAMA["num_hidden_layers"]
    )
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name]), name
