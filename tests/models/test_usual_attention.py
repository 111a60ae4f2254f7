"""Transformers' attention on a CPU, in 16 bits and in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from drivetrain.models.usual_attention import usual

SEEN = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]


def attended(parts: list[Tensor], mask: Tensor | None) -> Tensor:
    layer = nn.Module()
    layer.is_causal, layer.num_key_value_groups = True, 1  # type: ignore[assignment]
    return usual(layer, *parts, mask, {})  # type: ignore[misc]


@pytest.mark.parametrize("mask", [None, SEEN, torch.zeros(1, 1, 7, 7, dtype=torch.bfloat16).masked_fill(~SEEN, -1e9)])
def test_what_is_trained_in_16_bits_is_computed_in_fp32(mask: Tensor | None) -> None:
    """PyTorch's kernel for 16 bits would compile code for each length, and keep it."""
    torch.manual_seed(0)
    half = [torch.randn(2, 3, 7, 8).bfloat16().requires_grad_() for _ in range(3)]
    whole = [part.detach().float().requires_grad_() for part in half]
    expected = attended(whole, mask.float() if mask is not None and mask.is_floating_point() else mask)
    with torch.autocast("cpu", torch.bfloat16):
        found = attended(half, mask)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.bfloat16())
    outward = torch.randn_like(found)
    theirs = torch.autograd.grad(expected, whole, outward.float())
    for own, other in zip(torch.autograd.grad(found, half, outward), theirs, strict=True):
        assert torch.equal(own, other.bfloat16())


def test_rotated_queries_that_stayed_fp32_give_the_dtype_of_the_values() -> None:
    query, key, value = (torch.randn(1, 2, 7, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        assert attended([query, key, value.bfloat16()], None).dtype == torch.bfloat16
