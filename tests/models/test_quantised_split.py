"""Shares of a quantised layer: the same numbers as the whole one has, in as many bytes fewer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain.config.quantised import QuantisedBase
from drivetrain.models.quantised_base import quantise
from drivetrain.models.quantised_linear import QuantisedLinear

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "nf4": ("bitsandbytes", {"format": "nf4"}),
    "nf4, scales in fp32": ("bitsandbytes", {"format": "nf4", "double": False}),
    "int8": ("bitsandbytes", {"format": "int8"}),
    "int4": ("torchao", {"format": "int4", "group_size": 64}),
    "int8-torchao": ("torchao", {"format": "int8-torchao"}),
}
OUT, IN = 96, 1152  # 18 blocks of 64 a row: blocks of scales begin and end within rows


def layer(format: str, out: int = OUT, width: int = IN, bias: bool = True) -> QuantisedLinear:
    package, block = FORMATS[format]
    pytest.importorskip(package)
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(width, out, bias=bias))
    with torch.no_grad():  # so that scales differ from row to row and from column to column
        model[0].weight.mul_(torch.linspace(0.1, 4, out)[:, None]).mul_(torch.linspace(0.3, 3, width))
    quantise(model, QuantisedBase.model_validate(block))
    found = model[0]
    assert isinstance(found, QuantisedLinear)
    return found


def shares(whole: QuantisedLinear, dim: int, ranks: int) -> list[QuantisedLinear]:
    assert whole.whole_because(dim, ranks) is None
    parts = [copy.deepcopy(whole) for _ in range(ranks)]
    for rank, part in enumerate(parts):
        part.keep_share(dim, rank, ranks)
    return parts


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("dim", "ranks"), [(0, 2), (0, 3), (1, 2), (1, 9)])
def test_shares_have_the_very_numbers_of_the_whole(format: str, dim: int, ranks: int) -> None:
    whole = layer(format)
    parts = shares(whole, dim, ranks)
    assert torch.equal(torch.cat([part.dequantize() for part in parts], dim), whole.dequantize())
    assert sum(part.weight.nbytes for part in parts) == whole.weight.nbytes
    few = whole.scales.nbytes if format.startswith("int8") and dim else 4 * 64
    assert sum(part.scales.nbytes for part in parts) <= whole.scales.nbytes + (ranks - 1) * few


@pytest.mark.parametrize("format", FORMATS)
def test_products_of_shares_make_the_whole_one(format: str) -> None:
    whole, x = layer(format), torch.randn(5, IN)
    weight, bias = whole.dequantize(), whole.bias
    by_inputs = sum(part(piece) for part, piece in zip(shares(whole, 1, 2), x.chunk(2, -1), strict=True))
    torch.testing.assert_close(by_inputs + bias, F.linear(x, weight, bias))  # which whoever sums them adds
    for part, rows, of_rows in zip(shares(whole, 0, 2), weight.chunk(2), bias.chunk(2), strict=True):
        part.bias = nn.Parameter(of_rows)
        torch.testing.assert_close(part(x), F.linear(x, rows, of_rows))


def test_blocks_that_a_share_would_cut_are_reported() -> None:
    nf4 = layer("nf4", 8, 192)
    assert nf4.whole_because(1, 3) is None
    assert nf4.whole_because(1, 2) == "each 64 weights have one scale, and 96 lie together"
    assert layer("nf4", 8, 24).whole_because(0, 2) == "each 64 weights have one scale, and 96 lie together"
    assert layer("int8", 8, 24).whole_because(1, 8) is None


def test_groups_that_a_share_would_cut_are_reported() -> None:
    int4 = layer("int4", 8, 192)
    assert int4.whole_because(0, 8) is None
    assert int4.whole_because(1, 2) == "each 64 weights of a row have one scale, and 96 lie together"
