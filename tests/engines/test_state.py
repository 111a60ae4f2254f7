"""An optimizer's state belongs to names: neither the order of a model's layers nor how they are grouped moves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.engines.state import load_optimizer_state, optimizer_state
from drivetrain.errors import UserError


class Two(nn.Module):
    """Two layers of one shape; only the order in which they are registered differs."""

    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(3, 3, bias=False))


def stepped(model: nn.Module, groups: Sequence[Any]) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for number, (_, parameter) in enumerate(sorted(model.named_parameters()), 1):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()
    return optimizer


def first_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters() if p in optimizer.state}


def test_moments_go_to_their_names_where_layers_are_registered_in_another_order() -> None:
    before, after = Two("ab"), Two("ba")
    saved = optimizer_state(before, stepped(before, [*before.parameters()]), describe=torch.clone)
    optimizer = torch.optim.AdamW(after.parameters(), lr=0.5)
    load_optimizer_state(after, optimizer, saved)
    found = first_moments(after, optimizer)
    assert all(torch.equal(found[f"{name}.weight"], saved["state"][f"{name}.weight"]["exp_avg"]) for name in "ab")
    assert not torch.equal(found["a.weight"], found["b.weight"])
    assert optimizer.param_groups[0]["lr"] == 0.5, "the rate is this run's"


def test_moments_go_to_their_names_where_other_rates_make_other_groups() -> None:
    before, after = Two("ab"), Two("ab")
    saved = optimizer_state(before, stepped(before, [*before.parameters()]), describe=torch.clone)
    groups = [{"params": [after.b.weight], "lr": 0.2}, {"params": [after.a.weight], "lr": 0.3}]
    optimizer = torch.optim.AdamW(groups)  # type: ignore[arg-type]
    load_optimizer_state(after, optimizer, saved)
    found = first_moments(after, optimizer)
    assert all(torch.equal(found[f"{name}.weight"], saved["state"][f"{name}.weight"]["exp_avg"]) for name in "ab")
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.3]


def test_other_trained_parameters_than_before_are_refused_by_name() -> None:
    whole, part = Two("ab"), Two("ab")
    part.b.requires_grad_(False)  # type: ignore[union-attr]
    of_whole = stepped(whole, [*whole.parameters()])
    of_part = torch.optim.AdamW([p for p in part.parameters() if p.requires_grad])
    with pytest.raises(UserError, match=r"other parameters: it had, and this run freezes, b\.weight"):
        load_optimizer_state(part, of_part, optimizer_state(whole, of_whole))
    with pytest.raises(UserError, match=r"other parameters: it was without b\.weight"):
        load_optimizer_state(whole, of_whole, optimizer_state(part, of_part))
