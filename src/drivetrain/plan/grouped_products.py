"""The result of torch's product of groups of rows, each with a matrix of its own, without numbers: a mixture's experts.

PyTorch's rule for tensors without numbers takes bfloat16 alone. The operator itself takes three types: where its kernel
for bfloat16 does not apply, it multiplies group by group, into a result that lies in memory alike
(aten/src/ATen/native/GroupedMMUtils.h). Of a CPU build the rule leaves out that rows begin at multiples of 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

OPERATOR = torch.ops.aten._grouped_mm.default
TYPES = (torch.float32, torch.float16, torch.bfloat16)
BYTES = 16  # at multiples of which rows begin
Layout = tuple[list[int], list[int]]  # sizes and strides


def layout_of_result(
    first: Tensor,
    second: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Layout | None:
    """Returns how the result lies in memory; None where the operator refuses the types or shapes, of which PyTorch's
    own rule gives the reason.

    first: (rows, k), or (groups, rows, k); second: (groups, k, columns), or (k, columns). offs: (groups,), the ends
    of the groups along what the two-dimensional one is divided by. Raises RuntimeError for strides that it refuses.
    """
    one_type = first.dtype in TYPES and second.dtype == first.dtype and out_dtype in (None, first.dtype)
    dims = first.dim(), second.dim()
    if not one_type or bias is not None or not {*dims} <= {2, 3} or (offs is None) != (dims == (3, 3)):
        return None
    if dims != (2, 2) and first.shape[-1] != second.shape[-2]:
        return None
    for name, matrix in (("first", first), ("second", second)):
        _check_strides(name, matrix)
    rows, columns = first.shape[-2], second.shape[-1]
    alignment = BYTES // first.element_size()
    padded = -(-columns // alignment) * alignment
    if dims in ((2, 3), (3, 2)):
        return [rows, columns], [padded, 1]
    groups = first.shape[0] if offs is None else offs.shape[0]
    return [groups, rows, columns], [rows * padded, padded, 1]


def _check_strides(name: str, matrix: Tensor) -> None:
    (outer, inner), (rows, columns) = matrix.stride()[-2:], matrix.shape[-2:]
    length = outer if inner == 1 and outer >= max(1, columns) else inner if outer == 1 and inner >= max(1, rows) else 0
    if length == 0 or length * matrix.element_size() % BYTES:
        raise RuntimeError(
            f"a product of groups takes matrices whose rows or columns begin at multiples of {BYTES} bytes, and those "
            f"of the {name} one, {tuple(matrix.shape)} of {matrix.dtype}, have strides {tuple(matrix.stride())}"
        )
