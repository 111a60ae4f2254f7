"""Replaces linear layers by ones that compute otherwise: for the precision, or as they will after quantisation."""

from __future__ import annotations

from typing import Literal

from torch import nn

from drivetrain.config.precision import Precision
from drivetrain.models import fp8
from drivetrain.workloads.base import Workload


def computing_in(model: nn.Module, precision: Precision) -> nn.Module:
    """Replaces the layers before recompute, compiling and sharding, which depend on them. Parameters stay."""
    return fp8.compute_in_fp8(model) if precision.fp8 else model


def replaced(model: nn.Module, precision: Precision, workload: Workload) -> str | Literal[False]:
    """Returns a run's remarks about them."""
    if precision.fp8:
        return fp8.told(model)
    return False if workload.fake_quantiser is None else workload.fake_quantiser.told(model)
