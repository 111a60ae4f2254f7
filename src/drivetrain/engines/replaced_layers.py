"""Replaces linear layers by ones that compute otherwise: for the precision, or as they will after quantisation."""

from __future__ import annotations

from importlib import import_module
from typing import Literal

from torch import nn

from drivetrain.config.precision import Precision
from drivetrain.workloads.base import Workload


def check_installed(precision: Precision) -> None:
    """Raises UserError where a package is missing that the precision's layers need."""
    if precision.layers is not None:
        import_module(precision.layers).check_installed()


def computing_in(model: nn.Module, precision: Precision) -> nn.Module:
    """Replaces the layers before recompute, compiling and sharding, which depend on them. Parameters stay."""
    if precision.layers is None:
        return model
    found: nn.Module = import_module(precision.layers).replace_layers(model)
    return found


def replaced(model: nn.Module, precision: Precision, workload: Workload) -> str | Literal[False]:
    """Returns a run's remarks about them."""
    if precision.layers is not None:
        return str(import_module(precision.layers).description(model))
    return False if workload.fake_quantiser is None else workload.fake_quantiser.description(model)
