"""Attention within sequences as one operator: PyTorch's attention under a mask, and its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drivetrain.data.row_shape import Rows
from drivetrain.errors import RunError
from drivetrain.measure.flops import FlopCount
from drivetrain.models.packed_attention import bounds_of
from drivetrain.models.sequence_operator import attend_apart

POSITIONS = torch.tensor([[*range(5), *range(7)], [*range(2), *range(4), *range(6)]])


def under_a_mask(query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None) -> Tensor:
    number = (POSITIONS == 0).cumsum(1)
    behind = torch.arange(12)[:, None] - torch.arange(12)
    seen = (number[:, :, None] == number[:, None]) & (behind >= 0) & (behind < (window or 99))
    return F.scaled_dot_product_attention(query, key, value, seen[:, None], scale=scale, enable_gqa=True)


@pytest.mark.parametrize("fixed", [None, Rows(12, 3, 9)], ids=["as they come", "one shape of boundaries"])
@pytest.mark.parametrize(("heads", "window", "scale"), [(4, None, 0.3), (2, 3, None), (1, 6, 0.3)])
def test_it_is_attention_under_a_mask(heads: int, window: int | None, scale: float | None, fixed: Rows | None) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 12, 4, 8).transpose(1, 2)  # as a projection leaves it
    parts = [part.requires_grad_() for part in (query, torch.randn(2, heads, 12, 8), torch.randn(2, heads, 12, 8))]
    bounds = bounds_of(POSITIONS, fixed)
    assert bounds is not None
    assert bounds.shape[2:] == ((7, 4) if fixed is None else (9, 6))
    found = attend_apart(parts[0], parts[1], parts[2], bounds, window, scale)
    expected = under_a_mask(parts[0], parts[1], parts[2], window, scale).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    outward = torch.randn_like(found)
    pairs: Any = zip(*(torch.autograd.grad(each, parts, outward) for each in (found, expected)), strict=True)
    for own, theirs in pairs:
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_numbers_of_16_bits_are_computed_with_in_fp32(window: int | None) -> None:
    torch.manual_seed(0)
    half = [torch.randn(2, 4, 12, 8).bfloat16().requires_grad_() for _ in range(3)]
    whole = [part.detach().float().requires_grad_() for part in half]
    bounds = bounds_of(POSITIONS)
    assert bounds is not None
    found, expected = (attend_apart(*parts, bounds, window, None) for parts in (half, whole))
    assert torch.equal(found, expected.bfloat16())
    outward = torch.randn_like(found)
    theirs = torch.autograd.grad(expected, whole, outward.float())
    for own, other in zip(torch.autograd.grad(found, half, outward), theirs, strict=True):
        torch.testing.assert_close(
            own.float(), other, rtol=1e-2, atol=3e-2
        )  # the output was rounded between the passes


@pytest.mark.parametrize("branches", [False, True])
def test_it_keeps_to_the_rules_of_operators(branches: bool) -> None:
    """What a compiler assumes: shapes are told without computing, nothing is written to, gradients are its own."""
    positions = BRANCHES if branches else POSITIONS
    bounds = bounds_of(positions)
    parts = [torch.randn(len(positions), 4, positions.shape[1], 8, requires_grad=True) for _ in range(3)]
    operator: Any = torch.ops.drivetrain.attend_apart.default
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(operator, (*parts, bounds, 0 if branches else 3, 0.3), test_utils=tests)


# two prompts: one with three answers, of which one is a token long, and one with two; a sequence alone stands between
BRANCHES = torch.tensor([[*range(6), *range(3, 8), 3, *range(4), *range(5), *range(1, 3)]])


def seen_in_branches(positions: Tensor) -> Tensor:
    """Which places see which, (T, T), worked out place by place."""
    seen = torch.zeros(len(positions), len(positions), dtype=torch.bool)
    root = begin = 0
    for place, position in enumerate(positions.tolist()):
        if not place or position != positions[place - 1] + 1:
            begin = place
            root = root if position else place
        seen[place, begin : place + 1] = True
        seen[place, root : root + int(positions[begin])] = True
    return seen


@pytest.mark.parametrize("heads", [4, 2])
def test_answers_that_share_a_prompt_see_it_and_themselves(heads: int) -> None:
    torch.manual_seed(0)
    length = BRANCHES.shape[1]
    query = torch.randn(1, length, 4, 8).transpose(1, 2)
    parts = [part.requires_grad_() for part in (query, *(torch.randn(1, heads, length, 8) for _ in range(2)))]
    bounds = bounds_of(BRANCHES)
    assert bounds is not None
    assert bounds[0, :, 0].tolist() == [[0, 6, 11, 12, 16, 21, 23], [0, 3, 3, 0, 0, 1, 0]]
    found = attend_apart(parts[0], parts[1], parts[2], bounds, None, None)
    seen = seen_in_branches(BRANCHES[0])
    expected = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], seen, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    outward = torch.randn_like(found)
    pairs: Any = zip(*(torch.autograd.grad(each, parts, outward) for each in (found, expected)), strict=True)
    for own, theirs in pairs:
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=2e-6)


def test_a_branch_longer_than_the_window_is_refused() -> None:
    """Its mask would be one that no kernel here is given."""
    parts = [torch.randn(1, 2, BRANCHES.shape[1], 8) for _ in range(3)]
    bounds = bounds_of(BRANCHES)
    assert bounds is not None
    attend_apart(parts[0], parts[1], parts[2], bounds, 8, None)
    with pytest.raises(RunError, match="8 tokens, and a window of 7"):
        attend_apart(parts[0], parts[1], parts[2], bounds, 7, None)


def test_operations_of_answers_that_share_a_prompt_are_counted_by_what_they_see() -> None:
    parts = [torch.randn(1, 2, BRANCHES.shape[1], 8, requires_grad=True) for _ in range(3)]
    bounds = bounds_of(BRANCHES)
    assert bounds is not None
    with FlopCount() as count:
        attend_apart(parts[0], parts[1], parts[2], bounds, None, None).sum().backward()
    pairs = 6 * 6 + 5 * 8 + 1 * 4 + 4 * 4 + 5 * 5 + 2 * 3  # queries times the keys that they are given
    products = 2 + 5  # forward and backward
    assert count.total == products * 2 * 2 * 8 * pairs
