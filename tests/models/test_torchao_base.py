"""torchao's weight-only formats as layers of bytes, against torchao's own quantize_. What holds for every format of a
base (products, gradients, recompute, DDP, FSDP, adapters above) is in test_quantised_base.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.config.quantised import QuantisedBase, quantised_base_problems
from drivetrain.errors import UserError
from drivetrain.models import quantised_base
from drivetrain.models.quantised_base import quantise, weights_of_codes
from drivetrain.models.quantised_linear import QuantisedLinear
from drivetrain.runtime.library_messages import hush

pytest.importorskip("torchao")
SIZES = (32, 64, 128, 256)


def rows() -> nn.Linear:
    """Among them one of zeros, one of a single sign, one with an outlier, and one of one number."""
    torch.manual_seed(1)
    linear = nn.Linear(512, 40)
    linear.weight.data[3] = 0
    linear.weight.data[4].abs_()
    linear.weight.data[5, 7] = 30.0
    linear.weight.data[6] = -0.25
    return linear


def ours(config: QuantisedBase) -> QuantisedLinear:
    model = nn.Sequential(rows())
    quantise(model, config)
    (layer,) = model
    assert isinstance(layer, QuantisedLinear)
    return layer


def theirs(config: Any) -> nn.Linear:
    hush()
    from torchao.quantization import quantize_

    model = nn.Sequential(rows())
    quantize_(model, config)
    (layer,) = model
    assert isinstance(layer, nn.Linear)
    return layer


def int4(size: int) -> QuantisedBase:
    return QuantisedBase.model_validate({"format": "int4", "group_size": size})


@pytest.mark.parametrize("size", SIZES)
def test_int4_weights_are_torchaos_to_the_bit(size: int) -> None:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup
    from torchao.quantization.quant_primitives import MappingType

    config = IntxWeightOnlyConfig(torch.int4, PerGroup(size), MappingType.ASYMMETRIC)  # type: ignore[attr-defined]
    layer, expected = ours(int4(size)), theirs(config)
    assert torch.equal(layer.dequantize(), expected.weight.dequantize())
    low, high = layer.weight & 15, layer.weight >> 4
    found = torch.stack([low, high], -1).flatten(1).to(torch.int8) - 8
    assert torch.equal(found, expected.weight.qdata)  # type: ignore[attr-defined]


def test_int8_weights_are_torchaos_to_the_bit() -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    layer = ours(QuantisedBase(format="int8-torchao"))
    expected = theirs(Int8WeightOnlyConfig(set_inductor_config=False))
    assert torch.equal(layer.dequantize(), expected.weight.dequantize())
    assert torch.equal(layer.weight, expected.weight.qdata)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_for_16_bit_products_are_rounded_once(dtype: torch.dtype) -> None:
    for config in (int4(64), QuantisedBase(format="int8-torchao")):
        layer = ours(config)
        assert torch.equal(layer.unpacked(layer.weight, layer.scales, dtype), layer.dequantize().to(dtype))


def test_bytes_are_those_of_the_closed_forms() -> None:
    weights = 512 * 40
    for config, expected in (
        *((int4(size), 1 / 2 + 5 / size) for size in SIZES),
        (QuantisedBase(format="int8-torchao"), 1 + 4 / 512),
    ):
        layer = ours(config)
        assert layer.weight.nbytes + layer.scales.nbytes == pytest.approx(expected * weights, rel=1e-6)
        stands = weights_of_codes(nn.Sequential(layer))
        assert sum(p.numel() * stands.get(id(p), 0) for p in (layer.weight, layer.scales)) == weights


def test_a_group_that_does_not_fill_rows_is_refused_with_one_that_does() -> None:
    model = nn.Sequential(nn.Linear(192, 96), nn.Linear(96, 8))
    with pytest.raises(UserError, match=r"group_size: 0 has 192 inputs, 1 has 96 inputs, which is no multiple of 128"):
        quantise(copy.deepcopy(model), int4(128))
    with pytest.raises(UserError, match="give group_size=32"):
        quantise(copy.deepcopy(model), int4(128))
    with pytest.raises(UserError, match=r"no group size fits: take another quantised_base.format"):
        quantise(nn.Sequential(nn.Linear(20, 8)), int4(128))
    assert quantise(model, int4(32)) == ["0", "1"]


@pytest.mark.parametrize(("form", "extra"), [("int4", "lowbit"), ("int8-torchao", "lowbit"), ("nf4", "bitsandbytes")])
def test_a_missing_library_is_reported_with_its_extra(form: Any, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised_base, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=rf"{form} needs \w+, which is not installed[\s\S]*drivetrain\[{extra}\]"):
        quantise(nn.Sequential(rows()), QuantisedBase(format=form))


def test_a_key_of_another_format_is_refused_and_a_default_is_not() -> None:
    words = list(quantised_base_problems(QuantisedBase(format="int8", group_size=32), has_adapter=True))
    assert [(problem.field, problem.why) for problem in words] == [
        ("quantised_base.group_size", "it is of int4, and quantised_base.format is int8")
    ]
    spelt_out = QuantisedBase.model_validate(QuantisedBase(format="int8").model_dump())
    assert not list(quantised_base_problems(spelt_out, has_adapter=True))


def test_checkpoints_of_formats_that_were_there_before_know_their_base_again() -> None:
    """Another description would warn of another base."""
    assert QuantisedBase(format="nf4").numbers == {"format": "nf4", "double": True}
    assert int4(64).numbers != int4(32).numbers


def test_products_of_a_layer_are_those_of_its_weights() -> None:
    x: Tensor = torch.randn(3, 512)
    for config in (int4(128), QuantisedBase(format="int8-torchao")):
        layer = ours(config)
        assert torch.equal(layer(x), nn.functional.linear(x, layer.dequantize(), layer.bias))
