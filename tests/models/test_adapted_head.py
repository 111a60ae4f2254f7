"""A language model's head that is an adapter's target, or trained whole, with fused_loss: what plain PEFT computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from drivetrain.config.adapter import Adapter
from drivetrain.config.quantised import QuantisedBase
from drivetrain.data.language.vocabularies import END_OF_TEXT, byte_tokenizer
from drivetrain.models import fused_loss
from drivetrain.models.adapters import AdapterSet
from drivetrain.workloads.language_model import LanguageModelWorkload
from tests.tiny_language import LLAMA, ROWS, config


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Wider than one slab of the vocabulary, so that the loss is really fused."""
    monkeypatch.setattr(fused_loss, "LEAST_COLUMNS", 64)
    monkeypatch.setattr(fused_loss, "SLAB_BYTES", 1)
    tokenizer = byte_tokenizer([END_OF_TEXT])
    tokenizer.save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**{**LLAMA, "vocab_size": len(tokenizer)})).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def ours(
    base: Path, folder: Path, adapter: dict[str, Any], quantised: QuantisedBase | None = None
) -> tuple[LanguageModelWorkload, nn.Module]:
    given = config(folder, ROWS, model={"path": str(base), "fused_loss": True}, template="plain", packing=False)
    work = LanguageModelWorkload(given, seed=0)
    work.adapters = AdapterSet([Adapter.model_validate({"rank": 4, **adapter})], str(base), quantised)
    torch.manual_seed(3)
    return work, work.build_model()


def nudged(model: nn.Module) -> None:
    """Away from the start, where B is zero and A gets no gradient."""
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad and "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        name.removeprefix("base_model.model.").replace("modules_to_save.default.", ""): g for name, g in own.items()
    }


@pytest.mark.parametrize(
    ("adapter", "theirs", "falls_back"),
    [
        ({"targets": ["q_proj", "lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}, True),
        (
            {"targets": ["q_proj"], "train_also": ["lm_head"]},
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
            False,
        ),
        ({"targets": ["q_proj"]}, {"target_modules": ["q_proj"]}, False),
    ],
    ids=["a target", "whole", "frozen"],
)
def test_the_loss_and_gradients_are_plain_pefts(
    adapter: dict[str, Any], theirs: dict[str, Any], falls_back: bool, base: Path, tmp_path: Path
) -> None:
    work, model = ours(base, tmp_path, adapter)
    nudged(model)
    batch = work.collate([work.train.load(index, 0) for index in range(6)])
    loss = work.loss_sum(model, batch)
    loss.backward()

    plain: Any = peft.get_peft_model(
        LlamaForCausalLM.from_pretrained(base), peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **theirs)
    )
    own = model.state_dict()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            bare = name.removeprefix("base_model.model.")
            if "lora_" in bare:
                parameter.copy_(own[bare])
    logits = plain(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    wanted, found = gradients(plain), gradients(model)
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
    words = [text for text in work.warnings if "fused_loss" in text]
    assert bool(words) is falls_back
    assert all("has an adapter" in text for text in words)


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_the_loss_over_a_quantised_base_is_fused_too(form: str, base: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    quantised = QuantisedBase.model_validate({"format": form})
    work, model = ours(base, tmp_path, {"targets": ["q_proj"]}, quantised)
    batch = work.collate([work.train.load(index, 0) for index in range(6)])
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    assert work.loss_sum(model, batch).item() == pytest.approx(expected.item(), rel=1e-5)
    assert not [text for text in work.warnings if "fused_loss" in text]
