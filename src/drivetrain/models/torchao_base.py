"""torchao's weight-only formats as layers of frozen bytes: int4 by groups, asymmetric, and int8 by rows, symmetric.

A group of a row's weights has a scale s and a zero point z, so that its smallest and largest number (and 0, always) are
whole numbers of steps: w = s (q - z), q of -8 to 7. A row of int8 has a scale alone: w = s q, q of -128 to 127. Bytes
of n weights in r rows and groups of g:

    int4           n / 2 + 5 n / g
    int8-torchao   n + 4 r

The numbers are those of IntxWeightOnlyConfig(torch.int4, PerGroup(g), ASYMMETRIC) and Int8WeightOnlyConfig(). torchao's
own tensors are subclasses that DDP and FSDP cannot cut (0.18: no aten.view, no aten.split), so only its arithmetic of
scales and codes is used; why bytes serve instead: quantised_linear.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.models.quantised_linear import QuantisedLinear, as_floats, share_of, share_of_rows
from drivetrain.runtime.library_messages import hush


class Int4Linear(QuantisedLinear):
    """A layer in int4. codes: (out, in / 2) uint8, q + 8 of two neighbours a byte, the first in the low half. scales:
    an fp32 for each group, row by row, then an int8 zero point for each."""

    weights_a_code = 2

    def __init__(self, linear: nn.Linear, group_size: int) -> None:
        self._group_size = group_size
        super().__init__(linear)

    @property
    def _num_groups(self) -> int:
        return self.out_features * (self.in_features // self._group_size)

    def _layout(self) -> tuple[Tensor, Tensor]:
        empty = functools.partial(torch.empty, dtype=torch.uint8, device="meta")
        return empty(self.out_features, self.in_features // 2), empty(5 * self._num_groups)

    def packed(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        primitives = _primitives()
        block, bounds = (1, self._group_size), (-8, 7)
        scales, zeros = primitives.choose_qparams_affine(
            weight.float(),
            primitives.MappingType.ASYMMETRIC,
            block,
            torch.int8,
            *bounds,
            zero_point_dtype=torch.int8,
            keepdim=True,
        )
        found = primitives.quantize_affine(weight.float(), block, scales, zeros, torch.int8, *bounds)
        low, high = (found + 8).to(torch.uint8).view(self.out_features, -1, 2).unbind(-1)
        return low | high << 4, torch.cat([part.flatten().view(torch.uint8) for part in (scales, zeros)])

    def whole_because(self, dim: int, ranks: int) -> str | None:
        run = self.in_features // ranks
        if not dim or run % self._group_size == 0:
            return None
        return f"each {self._group_size} weights of a row have one scale, and {run} lie together"

    def _share(self, dim: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        floats, zeros = self.scales.split([4 * self._num_groups, self._num_groups])
        mine = functools.partial(share_of, rows=self.out_features if dim else 1, rank=rank, ranks=ranks)
        scales = torch.cat([mine(as_floats(floats)).view(torch.uint8), mine(zeros)])
        return self.weight.chunk(ranks, dim)[rank].contiguous(), scales

    def unpacked(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Unpacks a piece of rows too, with the scales of that piece."""
        floats = as_floats(scales[: scales.numel() // 5 * 4])
        zeros = scales[scales.numel() // 5 * 4 :].view(torch.int8)
        found = torch.stack([codes & 15, codes >> 4], -1).to(torch.int8) - 8
        steps = found.view(-1, self._group_size) - zeros[:, None]
        return (steps * floats[:, None]).to(dtype).view(codes.shape[0], -1)


class TorchaoInt8Linear(QuantisedLinear):
    """A layer in torchao's int8. codes: (out, in) int8. scales: for each row an fp32, a step."""

    def _layout(self) -> tuple[Tensor, Tensor]:
        codes = torch.empty(self.out_features, self.in_features, dtype=torch.int8, device="meta")
        return codes, torch.empty(4 * self.out_features, dtype=torch.uint8, device="meta")

    def packed(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        primitives = _primitives()
        block, bounds = (1, self.in_features), (-128, 127)
        scales, zeros = primitives.choose_qparams_affine(
            weight.float(),
            primitives.MappingType.SYMMETRIC,
            block,
            torch.int8,
            *bounds,
            eps=torch.finfo(torch.float32).eps,
            scale_dtype=torch.float32,
            zero_point_dtype=torch.int8,
            keepdim=True,
        )
        codes = primitives.quantize_affine(weight.float(), block, scales, zeros, torch.int8, *bounds)
        return codes, scales.flatten().view(torch.uint8)

    def _share(self, dim: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        return share_of_rows(self.weight, self.scales, dim, rank, ranks)

    def unpacked(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return (codes * as_floats(scales)[:, None]).to(dtype)


def _primitives() -> Any:
    hush()
    from torchao.quantization import quant_primitives

    return quant_primitives
