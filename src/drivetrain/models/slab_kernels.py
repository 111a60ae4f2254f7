"""Triton kernels of the fused loss: each passes over a slab of logits once, PyTorch's operators six to eight times. In
16 bits on a GPU such passes take longer than the matrix products.

Head and loss, forward and backward under bf16 autocast on an H200, relative to plain logits (16,384 rows of 896 over
128,256 tokens; 8,192 of 2,048): slabs by PyTorch's operators took 1.67 and 1.56, by these kernels 0.70 and 0.94.

torch.compile would make such kernels too, but chooses among several by timing them: a run that goes on after a kill
would then not have the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # columns at a time


# parameters of kernels: tensors as pointers, whole numbers, and constants in capitals
@triton.jit
def _see(  # type: ignore[no-untyped-def]
    logits, targets, start, width, log_sum, at_target, best, argmax, HAS_ARGMAX: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * width
    least = -3.4028234663852886e38  # stands for -inf, less which -inf is no number
    largest = tl.full((), least, tl.float32)
    total = tl.full((), 0, tl.float32)
    highest, likeliest = tl.full((), -float("inf"), tl.float32), tl.full((), 0, tl.int64)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        found = tl.load(own + column, mask=column < width, other=-float("inf")).to(tl.float32)
        peak = tl.max(found, 0)
        if HAS_ARGMAX:
            place = (begin + tl.argmax(found, 0)).to(tl.int64)
            likeliest = tl.where(peak > highest, place, likeliest)
            highest = tl.maximum(highest, peak)
        above = tl.maximum(largest, peak)
        total = total * tl.exp(largest - above) + tl.sum(tl.exp(found - above), 0)
        largest = above
    sums = largest + tl.log(total)
    before = tl.load(log_sum + row)
    upper, lower = tl.maximum(before, sums), tl.minimum(before, sums)
    both = tl.where(upper == -float("inf"), upper, upper + tl.log(1 + tl.exp(lower - upper)))
    is_number = (before == before) & (sums == sums)  # a maximum could leave out what is none
    tl.store(log_sum + row, tl.where(is_number, both, before + sums))
    target = tl.load(targets + row) - start
    inside = (target >= 0) & (target < width)
    tl.store(at_target + row, tl.load(own + target, mask=inside, other=0).to(tl.float32), mask=inside)
    if HAS_ARGMAX:
        known = tl.load(best + row)
        tl.store(argmax + row, tl.where(highest > known, start + likeliest, tl.load(argmax + row)))
        tl.store(best + row, tl.maximum(highest, known))


@triton.jit
def _changes(logits, into, targets, start, width, log_sum, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, inside = row * width + column, column < width
    chance = tl.exp(tl.load(logits + place, mask=inside).to(tl.float32) - tl.load(log_sum + row))
    change = tl.where(column == tl.load(targets + row) - start, chance - 1, chance) * tl.load(factor + row)
    tl.store(into + place, change.to(into.dtype.element_ty), mask=inside)


def see(
    logits: Tensor,
    start: int,
    targets: Tensor,
    log_sum: Tensor,
    at_target: Tensor,
    likeliest: tuple[Tensor, Tensor] | None,
) -> None:
    """Adds a slab's logits (N, v), of the tokens from `start`, to the running values of each row, in place.

    targets: (N,) int64. log_sum, at_target: (N,) fp32: log-sum-exp of all logits so far, and the target's logit, which
    stays as it is where the target is in another slab. likeliest: if wanted, the largest logit so far (N,) fp32 and its
    token (N,) int64.
    """
    best, argmax = (log_sum, targets) if likeliest is None else likeliest
    assert logits.is_contiguous(), "rows lie behind one another"
    kernel: Any = _see
    with torch.cuda.device_of(logits):
        kernel[(len(logits),)](
            *(logits, targets.contiguous(), start, logits.shape[1], log_sum, at_target, best, argmax),
            HAS_ARGMAX=likeliest is not None,
            BLOCK=BLOCK,
            num_warps=8,
        )


def changes(logits: Tensor, start: int, targets: Tensor, log_sum: Tensor, factor: Tensor, into: Tensor) -> None:
    """Writes the loss's gradient of a slab's logits (N, v): (softmax - 1 at the target) * factor.

    targets: (N,) int64. log_sum, factor: (N,) fp32. into: like the logits, and may be them.
    """
    assert logits.is_contiguous(), "rows lie behind one another"
    assert into.is_contiguous(), "rows lie behind one another"
    width = logits.shape[1]
    kernel: Any = _changes
    with torch.cuda.device_of(logits):
        kernel[(len(logits), triton.cdiv(width, BLOCK))](
            *(logits, into, targets.contiguous(), start, width, log_sum, factor), BLOCK=BLOCK, num_warps=8
        )
