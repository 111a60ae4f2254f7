"""Quantisation-aware training against plain torchao: the layers, the steps, and the model once it is quantised."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from drivetrain.config.quantisation_aware import QuantisationAware
from drivetrain.errors import UserError
from drivetrain.memory.recompute import apply_recompute
from drivetrain.models import fake_quantised
from drivetrain.models.fake_quantised import FakeQuantiser
from drivetrain.runtime.library_messages import hush

pytest.importorskip("torchao")
FORMATS = ("int8-dynamic-int4-weight", "int4-weight", "int8-weight")
each_format = pytest.mark.parametrize("form", FORMATS)


def torchaos(form: str, size: int = 32) -> Any:
    """The config that quantises a trained model, and from which torchao infers how to train it."""
    hush()
    from torchao.quantization import (
        Int8DynamicActivationIntxWeightConfig,
        IntxWeightOnlyConfig,
        PerAxis,
        PerGroup,
    )

    int4 = torch.int4  # type: ignore[attr-defined]
    if form == "int8-weight":
        return IntxWeightOnlyConfig(torch.int8, PerAxis(0))
    if form == "int4-weight":
        return IntxWeightOnlyConfig(int4, PerGroup(size))
    return Int8DynamicActivationIntxWeightConfig(int4, PerGroup(size))


def network() -> nn.Module:
    torch.manual_seed(0)
    block = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(2)]
    return nn.Sequential(nn.Linear(64, 64), nn.Sequential(*block), nn.Linear(64, 5, bias=False))


def prepared(form: Any, model: nn.Module | None = None, size: Any = 32) -> nn.Module:
    model = model or network()
    FakeQuantiser(QuantisationAware(format=form, group_size=size)).prepare(model)
    return model


def plainly(form: str, step: str, model: nn.Module | None = None, size: int = 32) -> nn.Module:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    model = model or network()
    quantize_(model, QATConfig(torchaos(form, size), step=step))
    return model


X, TARGETS = torch.randn(12, 64, generator=torch.Generator().manual_seed(3)), torch.arange(12) % 5


def trained(model: nn.Module, dtype: torch.dtype = torch.float32, steps: int = 8) -> tuple[list[float], list[Tensor]]:
    """Losses of steps of SGD with momentum, and the last gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X.to(dtype)).float(), TARGETS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@each_format
@pytest.mark.parametrize("size", [32, 64])
def test_steps_are_those_of_plain_torchao(form: str, size: int) -> None:
    ours, theirs = prepared(form, size=size), plainly(form, "prepare", size=size)
    (losses, last), (expected, their_last) = trained(ours), trained(theirs)
    assert losses == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(last, their_last)
    assert losses[-1] < losses[0] / 2
    assert losses != pytest.approx(trained(network())[0], rel=1e-4), "weights are rounded"


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_quantised_model_computes_what_the_trained_one_evaluates(form: str, dtype: torch.dtype) -> None:
    """To the bit: torchao rounds the same numbers in the same way, and dequantises before the product on a CPU."""
    from torchao.quantization import quantize_

    model = prepared(form, network().to(dtype))
    trained(model, dtype)
    model.eval()
    saved = network().to(dtype)
    saved.load_state_dict(model.state_dict())  # plain weights under plain names
    quantize_(saved, torchaos(form))
    with torch.no_grad():
        assert torch.equal(saved(X.to(dtype)), model(X.to(dtype)))
    converted = plainly(form, "convert", copy.deepcopy(model))
    with torch.no_grad():
        assert torch.equal(converted(X.to(dtype)), model(X.to(dtype)))


@each_format
def test_recompute_leaves_losses_and_gradients(form: str) -> None:
    model, recomputing = prepared(form), prepared(form)
    apply_recompute(recomputing)
    expected, found = trained(model, steps=3), trained(recomputing, steps=3)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)


# 2026-11, torch 2.13: its compiler, of any autograd.Function, and where a module keeps a tensor (torchao's scales)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
@each_format
def test_compile_leaves_losses(form: str) -> None:
    model, compiled = prepared(form), prepared(form)
    compiled.compile()
    assert trained(compiled, steps=3)[0] == pytest.approx(trained(model, steps=3)[0], rel=1e-4)


def test_parameters_are_the_same_ones_frozen_or_not_and_nothing_is_drawn() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    before, state = dict(model.named_parameters()), torch.get_rng_state()
    prepared("int4-weight", model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in after)
    assert not model.get_parameter("0.weight").requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    with torch.device("meta"):
        empty = network()
    assert {name for name, _ in prepared("int4-weight", empty).named_parameters()} == before.keys()
    assert all(parameter.is_meta for parameter in empty.parameters())


def test_the_head_of_a_language_model_stays_and_a_checkpoint_names_the_layers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=40, **sizes))
    quantiser = FakeQuantiser(QuantisationAware(format="int4-weight"))
    quantiser.prepare(model)
    assert type(model.lm_head) is nn.Linear
    assert quantiser.description(model) == "7 of 8 fake-quantised (int4-weight)"
    quantiser.write(model, tmp_path)
    words = json.loads((tmp_path / "quantisation_aware.json").read_text())
    assert (words["format"], words["group_size"]) == ("int4-weight", 32)
    assert len(words["layers"]) == 7
    assert "lm_head" not in words["layers"]
    assert "model.layers.0.mlp.down_proj" in words["layers"]


def test_what_cannot_be_prepared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"quantisation_aware.group_size: 0 has 48 inputs, which is no multiple of 32"):
        prepared("int4-weight", nn.Sequential(nn.Linear(48, 8)))
    prepared("int8-weight", nn.Sequential(nn.Linear(48, 8)))  # by rows
    with pytest.raises(UserError, match=r"quantisation_aware: Sequential has no linear layers beside its head"):
        prepared("int4-weight", nn.Sequential(nn.Embedding(3, 4)))
    monkeypatch.setattr(fake_quantised, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"it needs torchao[\s\S]*pip install 'drivetrain\[lowbit\]'"):
        prepared("int4-weight")
