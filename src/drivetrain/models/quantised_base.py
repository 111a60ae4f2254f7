"""Linear layers of a frozen base in 4 or 8 bits, under adapters that are trained in full precision.

Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs": NF4 is 16 values that split a normal distribution
into equal shares, one scale (the largest absolute value) for each block of 64 weights; double quantisation keeps those
scales in 8 bits, with one fp32 scale for 256 of them. int8 is the weights' part of LLM.int8() (Dettmers et al. 2022):
one scale for each row; inputs are not quantised. Bytes of n weights in r rows:

    nf4            n / 2 + 4 n / 64
    nf4, double    n / 2 + n / 64 + 4 n / (64 * 256)
    int8           n + 4 r

Numbers and kernels are bitsandbytes'. Its layers are not used: they keep scales in attributes, which no engine shards
and 8-bit ones lose under FSDP; on CPUs they compute otherwise in evaluation than in training, and 4-bit ones give no
gradients any more once they were evaluated on a CPU with AVX-512 BF16 (0.50). Here codes and scales are plain frozen
parameters of bytes, which every engine shards, gathers and moves like others, and which no change of dtype touches.
Weights are made anew for each product, forward and backward, in its dtype, and are never kept.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from drivetrain.config.quantised import QuantisedBase
from drivetrain.errors import problem
from drivetrain.low_bit import hush

BLOCK = 64  # weights with one scale
SCALES_BLOCK = 256  # scales with one scale, of double quantisation


def quantise(model: nn.Module, config: QuantisedBase, skip: Collection[str] = ()) -> list[str]:
    """Replace the linear layers in place, one after the other. Returns their names. UserError if there are none.

    skip: names of modules that stay as they are, with all within them. So do weights that several modules share
    (embeddings tied to a head), and subclasses of nn.Linear, whose owners may read the weight (nn.MultiheadAttention).
    """
    check_installed()
    _bitsandbytes()  # brings the operators, also where nothing is packed
    layers = _layers(model, skip)
    if not layers:
        why = f"{type(model).__name__} has no linear layers to quantise"
        raise problem("quantised_base", why, "leave it out, or let fewer modules be trained whole")
    for names in layers:
        _replace(model, names, config)
    return [name for names in layers for name in names]


def weights_of_codes(model: nn.Module) -> dict[int, int]:
    """id of a parameter of bytes → weights that each of its numbers stands for; none where they are scales."""
    found: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            found |= {id(module.weight): 2 if isinstance(module, Nf4Linear) else 1, id(module.scales): 0}
    return found


def check_installed() -> None:
    """UserError if bitsandbytes is not there."""
    if find_spec("bitsandbytes") is None:
        raise problem(
            "quantised_base", "it needs bitsandbytes, which is not installed", "pip install 'drivetrain[bitsandbytes]'"
        )


def _layers(model: nn.Module, skip: Collection[str]) -> list[list[str]]:
    """All names of each layer, for it may be called in several places. Names alone: they keep no weight alive."""
    users = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        kept = any(name == given or name.startswith(f"{given}.") for given in skip)
        if name and not kept and type(module) is nn.Linear and users[id(module.weight)] == 1:
            found.setdefault(id(module), []).append(name)
    return list(found.values())


def _replace(model: nn.Module, names: list[str], config: QuantisedBase) -> None:
    linear: Any = model.get_submodule(names[0])
    if not linear.weight.is_meta and not torch.isfinite(linear.weight).all():
        raise problem("quantised_base", f"{names[0]} has weights that are not finite", "take a base without them")
    made = Int8Linear(linear) if config.format == "int8" else Nf4Linear(linear, config.double)
    made.train(linear.training)
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made)


class QuantisedLinear(nn.Linear, ABC):
    """x W^T + b. weight: codes; scales: what they are multiplied by, as bytes."""

    scales: nn.Parameter

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.bias = linear.bias
        if linear.weight.is_meta:  # another rank has the numbers; bitsandbytes would keep tables without any, for good
            codes, scales = self._layout()
        else:
            codes, scales = self._packed(linear.weight.detach().contiguous())
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) → (..., out), in autocast's dtype where there is one, else in that of x."""
        kind = x.device.type
        computes_in = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if self.bias is None else self.bias.to(computes_in)
        product: Tensor = _Product.apply(x.to(computes_in), bias, self.weight, self.scales, self.unpacked)
        return product

    def dequantize(self) -> Tensor:
        """The weights, (out, in) fp32. By this name PEFT's DoRA finds them, where there is a W_q."""
        return self.unpacked(self.weight, self.scales, torch.float32)

    @property
    def W_q(self) -> Tensor:
        return self.weight

    @abstractmethod
    def _packed(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of (out, in) weights."""

    @abstractmethod
    def _layout(self) -> tuple[Tensor, Tensor]:
        """The same without numbers, on the meta device."""

    @abstractmethod
    def unpacked(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The reverse of _packed: (out, in)."""


class Nf4Linear(QuantisedLinear):
    """codes: (ceil(out * in / 2), 1) uint8, two weights a byte, as bitsandbytes lays them out. scales: an fp32 for each
    block; if double, fp32 numbers (the blocks' mean scale, one scale for 256 blocks), then a byte for each block."""

    def __init__(self, linear: nn.Linear, double: bool) -> None:
        self._double = double
        super().__init__(linear)

    @property
    def _num_blocks(self) -> int:
        return math.ceil(self.in_features * self.out_features / BLOCK)

    @property
    def _num_floats(self) -> int:
        return 1 + math.ceil(self._num_blocks / SCALES_BLOCK) if self._double else self._num_blocks

    def _layout(self) -> tuple[Tensor, Tensor]:
        codes = math.ceil(self.in_features * self.out_features / 2)
        scales = 4 * self._num_floats + (self._num_blocks if self._double else 0)
        empty = functools.partial(torch.empty, dtype=torch.uint8, device="meta")
        return empty(codes, 1), empty(scales)

    def _packed(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        codes, state = _bitsandbytes().quantize_4bit(
            weight, blocksize=BLOCK, quant_type="nf4", compress_statistics=self._double
        )
        if not self._double:
            return codes, state.absmax.view(torch.uint8)
        floats = torch.cat([state.offset.view(1), state.state2.absmax])
        return codes, torch.cat([floats.view(torch.uint8), state.absmax])

    def unpacked(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """As one long row: of rows that blocks do not fill, bitsandbytes' kernel for AVX-512 takes the wrong scales."""
        shape, absmax = [1, 2 * codes.numel()], self._absmax(scales)
        row: Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(codes, absmax, BLOCK, "nf4", shape, dtype)
        return row[0, : self.out_features * self.in_features].view(self.out_features, self.in_features)

    def _absmax(self, scales: Tensor) -> Tensor:
        """(blocks,) fp32."""
        floats = _as_floats(scales[: 4 * self._num_floats])
        if not self._double:
            return floats
        table = _table(scales.device)
        return floats[0] + torch.ops.bitsandbytes.dequantize_blockwise.default(
            scales[4 * self._num_floats :], floats[1:], table, SCALES_BLOCK, torch.float32
        )


class Int8Linear(QuantisedLinear):
    """codes: (out, in) int8. scales: of each row an fp32, which 127 stands for."""

    def _layout(self) -> tuple[Tensor, Tensor]:
        codes = torch.empty(self.out_features, self.in_features, dtype=torch.int8, device="meta")
        return codes, torch.empty(4 * self.out_features, dtype=torch.uint8, device="meta")

    def _packed(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales, _ = _bitsandbytes().int8_vectorwise_quant(weight.half())
        return codes, scales.view(torch.uint8)

    def unpacked(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return (codes * (_as_floats(scales) / 127)[:, None]).to(dtype)


class _Product(torch.autograd.Function):
    """F.linear, whose weight is unpacked for each of its two products; the codes alone are kept between them."""

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


def _as_floats(scales: Tensor) -> Tensor:
    """Copied first: an engine may hand over a piece of its own buffer that starts where no number could."""
    return scales.clone().view(torch.float32)


def _bitsandbytes() -> Any:
    hush()
    import bitsandbytes.functional

    return bitsandbytes.functional


@torch.compiler.assume_constant_result
def _table(device: torch.device) -> Tensor:
    """The 256 values that codes of scales point into (Dettmers et al. 2022, "8-bit Optimizers")."""
    return _made_table(device)


@functools.cache
def _made_table(device: torch.device) -> Tensor:
    table: Tensor = _bitsandbytes().create_dynamic_map().to(device)
    return table
