"""Cross-entropy of logits that are there, with one tensor of their size beside them instead of three.

torch's own keeps the log-probabilities, makes a gradient of them that is 0 but at the targets, and from both that of
the logits. Here the forward pass makes the gradient at once, some rows at a time while they are in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORED = -100
BYTES_AT_ONCE = 2 * 2**20  # of fp32: a CPU's cache
LARGER_ON_GPU = 64  # where small kernels leave most of it idle


@torch.compiler.disable
def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """F.cross_entropy(logits.float(), targets, reduction="sum"): fp32, scalar; its gradient cannot be differentiated.

    logits: (N, V); targets: (N,) int64, -100 is ignored. Small ones go to torch's, which has fewer calls.
    """
    rows = _rows(logits)
    if not (type(logits) is Tensor and logits.requires_grad and rows < len(logits)):
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
    loss: Tensor = _SummedLoss.apply(logits, targets, rows)
    return loss


def _rows(logits: Tensor) -> int:
    most = BYTES_AT_ONCE * (1 if logits.device.type == "cpu" else LARGER_ON_GPU)
    return max(1, most // (4 * logits.shape[1]))


class _SummedLoss(torch.autograd.Function):
    """The gradient waits in fp32: fp16 cannot hold it before it is scaled."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, rows: int) -> Tensor:
        gradient = torch.empty_like(logits, dtype=torch.float32)
        total = gradient.new_zeros(())
        for part, own, change in zip(logits.split(rows), targets.split(rows), gradient.split(rows), strict=True):
            counts = (own != IGNORED)[:, None]
            place, part = torch.where(counts, own[:, None], 0), part.float()
            largest = part.amax(1, keepdim=True)
            summed = torch.sub(part, largest, out=change).exp_().sum(1, keepdim=True)
            total += torch.where(counts, summed.log() + largest - part.gather(1, place), 0).sum()
            change.div_(summed).scatter_add_(1, place, torch.full_like(summed, -1)).mul_(counts)
        ctx.save_for_backward(gradient)
        ctx.dtype = logits.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        scaled = torch.empty_like(gradient, dtype=ctx.dtype)
        return torch.mul(gradient, upstream, out=scaled), None, None
