"""Products by a copy of a weight that lies in the order in which a library's kernels read it.

PyTorch has two such libraries, oneDNN and Intel's MKL. MKL packs fp32 alone and is quick on Intel's processors: there
(a Xeon of Cascade Lake, two cores) the products of a step of 8 rows took 2.4 ms by it, 4.1 by oneDNN and 3.8 by the
weights as they lie. The choice depends on nothing but the processor and the dtype, so that a run
that is resumed computes the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from drivetrain.runtime.hardware import cpu_name

ROWS = 64  # that oneDNN chooses its order for; others are about as quick with it
Multiply = Callable[[Tensor, Tensor | None], Tensor]  # an input, (..., inputs), and a bias → (..., outputs)


def packed(weight: Tensor) -> Multiply:
    """Returns what multiplies by a packed copy of a weight, (outputs, inputs), contiguous, fp32 or bf16, on a CPU.

    Raises RuntimeError, AttributeError or NotImplementedError where PyTorch was built without the kernels.
    """
    if weight.dtype == torch.float32 and _prefers_mkl():
        return _by_mkl(weight)
    return _by_onednn(weight)


@functools.cache
def _prefers_mkl() -> bool:
    return "Intel" in cpu_name() and torch.backends.mkl.is_available()


def _by_onednn(weight: Tensor) -> Multiply:
    copy = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    times = torch.ops.mkldnn._linear_pointwise.default

    def multiply(given: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = times(given, copy, bias, "none", [], "")
        return found

    return multiply


def _by_mkl(weight: Tensor) -> Multiply:
    copy = torch.ops.mkl._mkl_reorder_linear_weight(weight, ROWS)  # the order is one for any number of rows
    # PyTorch asks for the weight beside its copy, and reads its shape: its numbers only where the rows that it is
    # given at the end are not those of the input
    shape = weight.new_zeros(()).expand(weight.shape)
    times = torch.ops.mkl._mkl_linear.default

    def multiply(given: Tensor, bias: Tensor | None) -> Tensor:
        rows = given.numel() // given.shape[-1]
        found: Tensor = times(given, copy, shape, bias, rows)
        return found

    return multiply
