"""A linear layer whose weights are codes: the common part of its formats.

Codes and scales are plain frozen parameters of bytes, which every engine shards, gathers and moves like others, and
which no change of dtype touches. Weights are made anew for each product, forward and backward, in its dtype, and are
never kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F


class QuantisedLinear(nn.Linear, ABC):
    """Computes x W^T + b. weight: codes; scales: their factors, as bytes."""

    weights_a_code = 1  # that each number of the codes stands for
    adds_bias = True  # but where several ranks have parts of the inputs, and someone sums the products
    scales: nn.Parameter

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.bias = linear.bias
        if linear.weight.is_meta:  # another rank has the numbers; bitsandbytes would keep tables without any, for good
            codes, scales = self._layout()
        else:
            codes, scales = self.packed(linear.weight.detach().contiguous())
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (..., out) for (..., in), in autocast's dtype if there is one, else in that of x."""
        if x.is_meta:  # only shapes are wanted: autocast does not know this device, and there are no codes to unpack
            return x.new_empty(*x.shape[:-1], self.out_features)
        kind = x.device.type
        computes_in = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if self.bias is None or not self.adds_bias else _own(self.bias).to(computes_in)
        codes, scales = _own(self.weight), _own(self.scales)
        product: Tensor = _Product.apply(x.to(computes_in), bias, codes, scales, self.unpacked)
        return product

    def keep_share(self, dim: int, rank: int, ranks: int) -> None:
        """Keeps, in place, one rank's part of the outputs (dim 0) or inputs (1): the same codes of the same weights.

        Check whole_because first. The bias stays whole.
        """
        codes, scales = self._share(dim, rank, ranks)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.adds_bias = dim == 0
        if dim == 0:
            self.out_features //= ranks
        else:
            self.in_features //= ranks

    def whole_because(self, dim: int, ranks: int) -> str | None:
        """Returns why its outputs (dim 0) or inputs (1), a multiple of ranks, cannot be split. None if they can."""
        del dim, ranks
        return None

    def dequantize(self) -> Tensor:
        """Returns the weights, (out, in) fp32. PEFT's DoRA finds them by this name, where there is a W_q."""
        return self.unpacked(self.weight, self.scales, torch.float32)

    def plain(self) -> nn.Linear:
        """Returns a layer with the same numbers as whole weights, in fp32."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.dequantize(), requires_grad=False)
        linear.bias = self.bias
        return linear.train(self.training)

    @property
    def W_q(self) -> Tensor:
        return self.weight

    @abstractmethod
    def packed(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns codes and scales of (out, in) weights."""

    @abstractmethod
    def _layout(self) -> tuple[Tensor, Tensor]:
        """Returns the shapes of codes and scales, on the meta device."""

    @abstractmethod
    def _share(self, dim: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """Returns codes and scales of one rank's part, from which `unpacked` makes its weights."""

    @abstractmethod
    def unpacked(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Reverses `packed`: (out, in)."""


class _Product(torch.autograd.Function):
    """F.linear whose weight is unpacked for each of its two products; only the codes are kept between them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, codes: Tensor, scales: Tensor, unpacked: Any) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.unpacked = unpacked
        return F.linear(x, unpacked(codes, scales, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        to_x = to_bias = None
        if ctx.needs_input_grad[0]:
            to_x = gradient @ ctx.unpacked(*ctx.saved_tensors, gradient.dtype)
        if ctx.needs_input_grad[1]:
            to_bias = gradient.flatten(0, -2).sum(0)
        return to_x, to_bias, None, None, None


def as_floats(scales: Tensor) -> Tensor:
    """Reads bytes as floats. Copies first: an engine may pass a piece of its own buffer that is not aligned."""
    return scales.clone().view(torch.float32)


def share_of(numbers: Tensor, rows: int, rank: int, ranks: int) -> Tensor:
    """Returns a part of each row of numbers that lie row by row, flat: (rows, ranks, n)[:, rank]."""
    return numbers.reshape(rows, ranks, -1)[:, rank].flatten()


def share_of_rows(codes: Tensor, scales: Tensor, dim: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Returns a rank's share of (out, in) codes with an fp32 for each row."""
    own = scales.clone() if dim else as_floats(scales).chunk(ranks)[rank].view(torch.uint8)
    return codes.chunk(ranks, dim)[rank].contiguous(), own


def _own(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
