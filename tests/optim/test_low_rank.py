"""GaLore as a run file names it, and optimizers of others that would look done: refused with what to take instead."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.config.training import Optimizer
from drivetrain.engines.state import load_optimizer_state, optimizer_state
from drivetrain.errors import UserError
from drivetrain.optim.optimizers import optimizer_factory

pytest.importorskip("pytorch_optimizer")


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_galores_checkpoint_is_refused_by_a_run_of_another_rank() -> None:
    model = nn.Linear(8, 8)
    first, second = (optimizer_factory(Optimizer(name="galore", options={"rank": rank}))(model) for rank in (2, 4))
    stepped(model, first)
    load_optimizer_state(model, second, optimizer_state(model, first, lambda tensor: tensor))
    with pytest.raises(UserError, match=r"optimizer\.options\.rank: the checkpoint's moments are of rank=2"):
        stepped(model, second)


def test_galore_by_its_import_path_is_galore() -> None:
    model = nn.Linear(16, 8)
    optimizer = optimizer_factory(Optimizer(name="pytorch_optimizer:GaLore", options={"rank": 2}))(model)
    stepped(model, optimizer)
    assert optimizer.state[model.weight]["exp_avg"].shape == (2, 16)
    with pytest.raises(UserError, match=r"optimizer\.options\.rnak: GaLore has no such argument"):
        optimizer_factory(Optimizer(name="galore", options={"rnak": 2}))
    with pytest.raises(UserError, match=r"rank \(0\) is no whole number above 0"):
        optimizer_factory(Optimizer(name="galore", options={"rank": 0}))(model)


def test_betas_and_eps_go_to_adams_kind_only() -> None:
    given = {"betas": (0.8, 0.9), "eps": 1e-6}
    galore = optimizer_factory(Optimizer(name="galore", **given))(nn.Linear(2, 2)).defaults
    assert (galore["betas"], galore["eps"]) == ((0.8, 0.9), 1e-6)
    adafactor = optimizer_factory(Optimizer(name="adafactor", options={"eps": [None, 1e-4]}, **given))(nn.Linear(2, 2))
    assert adafactor.defaults["eps"] == [None, 1e-4]


# --- what would look done --------------------------------------------------------------------------------------------


class FromAModel(torch.optim.SGD):
    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model.parameters(), lr)


class WithObjects(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = object()
        return super().step(closure)


REFUSED = {
    "galore_torch:GaLoreAdamW": "it would train as plain AdamW",
    "apollo_torch:APOLLOAdamW": "it would train as plain AdamW",
    "pytorch_optimizer:APOLLO": "which APOLLO's paper does not",
    "pytorch_optimizer:AdamMini": "AdamMini is made from a model's names",
    f"{__name__}:FromAModel": "FromAModel is made from a model's names",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_look_done_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"(?s)^optimizer.name: .*{re.escape(REFUSED[name])}"):
        optimizer_factory(Optimizer(name=name))


def test_a_state_that_no_checkpoint_holds_is_refused_in_the_first_step() -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_factory(Optimizer(name=f"{__name__}:WithObjects"))(model)
    with pytest.raises(UserError, match="WithObjects keeps kept as a object, which has no form in a checkpoint"):
        stepped(model, optimizer)
