"""An optimizer's update, unless it is refused.

If the decision is on the device, torch's fused kernels read it there: it takes the place in which a gradient scaler
leaves whether gradients overflowed (`found_inf`), and where it is 1 they change neither weights nor state. Optimizers
without such kernels always update; the numbers show it when they are read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from drivetrain.engines.base import StepGuard


def update(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, norm: Tensor, judge: StepGuard | None
) -> tuple[bool, bool]:
    """Updates; returns whether it was refused, and whether that was left to the device."""
    refused = False if judge is None else judge(norm)
    if isinstance(refused, Tensor):
        return False, _held_back(scaler, optimizer, refused)
    if not refused:
        scaler.step(optimizer)
    return refused, False


def _held_back(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, refused: Tensor) -> bool:
    own: Any = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer keeps one within
    able = getattr(own, "_step_supports_amp_scaling", False)
    if able:
        own.found_inf = _beside(own, refused.float())
    try:
        scaler.step(optimizer)
    finally:
        if able:
            del own.found_inf
    return able


def _beside(optimizer: torch.optim.Optimizer, flag: Tensor) -> Tensor:
    """Returns the flag in the form that a kernel over these parameters takes: on their device; for shards, on their
    mesh.

    For parameters in CPU memory (FSDP's offload) it is waited for here: the fused kernel would copy it without waiting
    and read it at once.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sharded = next((p for p in parameters if isinstance(p, DTensor)), None)
    if sharded is None:
        return flag.to(parameters[0].device)
    mesh, flag = sharded.device_mesh, flag.to(sharded.to_local().device)
    return DTensor.from_local(flag, mesh, [Replicate()] * mesh.ndim, run_check=False)
