"""Linear layers that compute otherwise than nn.Linear: by the precision, or as they will once they are quantised."""

from __future__ import annotations

from typing import Literal

from torch import nn

from drivetrain.config.precision import Precision
from drivetrain.models import fp8
from drivetrain.workloads.base import Workload


def computing_in(model: nn.Module, precision: Precision) -> nn.Module:
    """Before recompute, compiling and sharding, which go by the layers that there are. Parameters stay."""
    return fp8.compute_in_fp8(model) if precision.fp8 else model


def replaced(model: nn.Module, precision: Precision, workload: Workload) -> str | Literal[False]:
    """What a run says of them."""
    if precision.fp8:
        return fp8.told(model)
    return False if workload.fake_quantiser is None else workload.fake_quantiser.told(model)
