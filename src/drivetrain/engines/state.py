"""An optimizer's state under parameter names instead of positions, so that it fits the model on any engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def named_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """optimizer.state_dict() with names for numbers: {"state": {name: ...}, "param_groups": [{"params": [name]}]}."""
    names = _names_by_position(model, optimizer)
    saved = optimizer.state_dict()
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in saved["param_groups"]]
    return {"state": {names[i]: state for i, state in saved["state"].items()}, "param_groups": groups}


def load_named_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """The reverse; `optimizer` must hold the same parameters."""
    positions = {name: i for i, name in _names_by_position(model, optimizer).items()}
    groups = [{**group, "params": [positions[n] for n in group["params"]]} for group in saved["param_groups"]]
    state = {positions[name]: state for name, state in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _names_by_position(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {position: name_of[id(parameter)] for position, parameter in enumerate(parameters)}
