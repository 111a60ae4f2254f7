"""Where there are kernels that pass over logits once, and what stands for them in a plan."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from drivetrain.models.planned_device import kind_of_device, planned_machine


def kernels_for(logits: Tensor) -> Any:
    """Returns the module `slab_kernels`, or what stands for it in a plan, for logits on a GPU that has Triton; None
    elsewhere."""
    if planned_machine() is not None:
        return _Planned if kind_of_device(logits) == "cuda" else None
    if not (logits.is_cuda and _has_triton()):
        return None
    from drivetrain.models import slab_kernels  # imports Triton

    return slab_kernels


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


class _Planned:
    """Reads and writes as much as the kernels, and computes nothing of use."""

    @staticmethod
    def see(logits: Tensor, start: int, targets: Tensor, log_sum: Tensor, *others: Any) -> None:
        del start, targets, others
        log_sum.copy_(logits.amax(1))

    @staticmethod
    def changes(logits: Tensor, start: int, targets: Tensor, log_sum: Tensor, factor: Tensor, into: Tensor) -> None:
        del start, targets, log_sum, factor
        into.copy_(logits)
