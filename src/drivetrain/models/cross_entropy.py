"""Computes the cross-entropy of existing logits, with one more tensor of their size instead of three.

torch's own keeps the log-probabilities, makes their gradient, which is 0 except at the targets, and from both that of
the logits. Here one tensor waits for the backward pass, and all else is made some rows at a time, in the cache.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from drivetrain.models.logit_kernels import kernels_for
from drivetrain.models.planned_device import kind_of_device

IGNORED = -100
BYTES_AT_ONCE = 2 * 2**20  # of fp32: a CPU's cache
LARGER_ON_GPU = 64  # where small kernels leave most of it idle


@torch.compiler.disable
def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns F.cross_entropy(logits.float(), targets, reduction="sum"): fp32, scalar; its gradient cannot be
    differentiated.

    logits: (N, V); targets: (N,) int64, -100 is ignored. Small ones go to torch's, which has fewer calls.
    """
    rows = rows_at_once(logits)
    if _by_kernels(logits):
        found: Tensor = _KernelLosses.apply(logits, targets)
        return found.sum()
    if is_traceable_wrapper_subclass(logits) or not logits.requires_grad or rows >= len(logits):
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
    losses: Tensor = _Losses.apply(logits, targets, rows)
    return reduce(torch.add, [part.sum() for part in losses.split(rows)])  # the order decides the last bit


@torch.compiler.disable
def cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the same for each row, (N,) fp32, with reduction="none"."""
    rows = rows_at_once(logits)
    if _by_kernels(logits):
        found: Tensor = _KernelLosses.apply(logits, targets)
        return found
    if is_traceable_wrapper_subclass(logits) or rows >= len(logits):
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")
    if not logits.requires_grad:  # nothing of the logits' size is made beside them
        return cross_entropy_of_each(logits, targets)
    losses: Tensor = _Losses.apply(logits, targets, rows)
    return losses


@torch.no_grad()
@torch.compiler.disable
def log_square_sums(logits: Tensor) -> Tensor:
    """Returns log Σ p² over each row's probabilities p, (N,) fp32: the logarithm of the probability that a drawn token
    has on average. logits: (N, V)."""
    parts = logits.detach().split(rows_at_once(logits))
    return torch.cat([(2 * part.float().log_softmax(-1)).logsumexp(-1) for part in parts])


def rows_at_once(logits: Tensor) -> int:
    """Returns how many rows of logits (N, V) fit into the cache in fp32."""
    most = BYTES_AT_ONCE * (1 if kind_of_device(logits) == "cpu" else LARGER_ON_GPU)
    return max(1, most // (4 * logits.shape[1]))


def cross_entropy_of_each(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns F.cross_entropy(logits.float(), targets, reduction="none"), (N,) fp32, without gradients: some rows at a
    time."""
    rows = rows_at_once(logits)
    pairs = zip(logits.split(rows), targets.split(rows), strict=True)
    parts = [F.cross_entropy(part.float(), own, ignore_index=IGNORED, reduction="none") for part, own in pairs]
    return torch.cat(parts)


def _by_kernels(logits: Tensor) -> bool:
    """Returns whether kernels pass over the logits: many ones of 16 bits, on a GPU, that lie in one piece."""
    is_plain = not is_traceable_wrapper_subclass(logits) and logits.requires_grad and logits.is_contiguous()
    many = logits.dtype in (torch.bfloat16, torch.float16) and rows_at_once(logits) < len(logits)
    return is_plain and many and kernels_for(logits) is not None


class _KernelLosses(torch.autograd.Function):
    """The autograd function by kernels: one pass forward, and one backward that writes the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        log_sum = torch.full((len(logits),), -torch.inf, dtype=torch.float32, device=logits.device)
        at_target = torch.full_like(log_sum, torch.nan)  # NaN stays where a target is no token
        kernels_for(logits).see(logits, 0, targets, log_sum, at_target, None)
        ctx.save_for_backward(logits, targets, log_sum)
        return torch.where(targets == IGNORED, 0, log_sum - at_target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        logits, targets, log_sum = ctx.saved_tensors
        gradient, factor = torch.empty_like(logits), torch.where(targets == IGNORED, 0, upstream.float())
        kernels_for(logits).changes(logits, 0, targets, log_sum, factor, into=gradient)
        return gradient, None


class _Losses(torch.autograd.Function):
    """The autograd function. fp32 logits are freed: their gradient waits in their place. 16-bit logits wait themselves,
    and their gradient is made in the backward pass: in fp32 it would be twice their size, and fp16 cannot hold it
    before it is scaled."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, rows: int) -> Tensor:
        keeps = logits.dtype == torch.float32
        gradient = torch.empty_like(logits) if keeps else None
        log_sums = torch.empty(len(logits), 1, dtype=torch.float32, device=logits.device)
        losses = log_sums.new_empty(len(logits))
        room = None if keeps else _room(logits, rows)
        for start in range(0, len(logits), rows):
            own = slice(start, start + rows)
            counts, place = _counted(targets[own])
            part = logits[own] if room is None else _in_fp32(logits[own], room)
            largest, at_target = part.amax(1, keepdim=True), part.gather(1, place)
            change = torch.sub(part, largest, out=part if gradient is None else gradient[own]).exp_()
            summed = change.sum(1, keepdim=True)
            torch.add(summed.log(), largest, out=log_sums[own])
            losses[own] = torch.where(counts, log_sums[own] - at_target, 0)[:, 0]
            if keeps:
                change.div_(summed).scatter_add_(1, place, torch.full_like(summed, -1)).mul_(counts)
        ctx.save_for_backward(*((gradient,) if keeps else (logits, targets, log_sums)))
        ctx.rows = rows
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if len(ctx.saved_tensors) == 1:
            return ctx.saved_tensors[0] * upstream[:, None], None, None
        logits, targets, log_sums = ctx.saved_tensors
        scaled, room = torch.empty_like(logits), _room(logits, ctx.rows)
        for start in range(0, len(logits), ctx.rows):
            own = slice(start, start + ctx.rows)
            counts, place = _counted(targets[own])
            change = _in_fp32(logits[own], room).sub_(log_sums[own]).exp_()
            scaled[own] = change.scatter_add_(1, place, torch.full_like(log_sums[own], -1)).mul_(
                counts * upstream[own, None]
            )
        return scaled, None, None


def _room(logits: Tensor, rows: int) -> Tensor:
    """Returns memory for some rows in fp32, which stays in the cache from those to the next."""
    return torch.empty(rows, logits.shape[1], dtype=torch.float32, device=logits.device)


def _in_fp32(part: Tensor, room: Tensor) -> Tensor:
    return room[: len(part)].copy_(part)


def _counted(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns for some rows whether each has a target, and which, 0 if it has none; (n, 1) each."""
    counts = (targets != IGNORED)[:, None]
    return counts, torch.where(counts, targets[:, None], 0)
