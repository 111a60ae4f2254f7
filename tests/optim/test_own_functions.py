"""Optimizers that a function of the user's makes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.config.training import Optimizer
from drivetrain.errors import UserError
from drivetrain.optim.optimizers import factory_of, optimizer_factory


def test_a_function_named_in_the_run_file_makes_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import torch\ndef make(parameters, lr, nesterov=False):\n"
    code += "    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=nesterov)\n"
    (tmp_path / "own_optimizers.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    config = Optimizer(name="own_optimizers:make", lr=0.25, options={"nesterov": True})
    made = optimizer_factory(config)(nn.Linear(3, 2))
    assert isinstance(made, torch.optim.SGD)
    assert (made.defaults["lr"], made.defaults["nesterov"]) == (0.25, True)


def test_an_engine_that_makes_it_itself_gets_class_groups_and_arguments() -> None:
    seen: list[Any] = []

    def make(cls: Any, groups: Any, arguments: Any) -> torch.optim.Optimizer:
        seen.append((cls, arguments))
        return cls(groups, **arguments)

    factory = factory_of(lambda parameters: torch.optim.AdamW(parameters, lr=0.5, betas=(0.8, 0.9)))
    factory(nn.Linear(3, 2), make)
    ((cls, arguments),) = seen
    assert cls is torch.optim.AdamW
    assert (arguments["lr"], arguments["betas"]) == (0.5, (0.8, 0.9))


def test_frozen_parameters_are_not_passed() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    made = factory_of(lambda parameters: torch.optim.SGD(parameters, lr=0.1))(model)
    assert [p.shape for p in made.param_groups[0]["params"]] == [model.weight.shape]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda _: None, "gives a NoneType"),
        (lambda _: 1 / 0, "ZeroDivisionError"),
        (lambda _: torch.optim.SGD([torch.zeros(1)], lr=1.0), "other parameters"),
    ],
)
def test_a_function_that_makes_none_is_refused_with_the_line(function: Any, why: str) -> None:
    with pytest.raises(UserError, match=why) as caught:
        factory_of(function)(nn.Linear(3, 2))
    assert "optimizer=lambda parameters:" in caught.value.problems[0].fix
