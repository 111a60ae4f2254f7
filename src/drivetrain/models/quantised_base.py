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
gradients any more once they were evaluated on a CPU with AVX-512 BF16 (0.50). quantised_linear.py has our own layer,
torchao_base.py torchao's formats.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.config.quantised import QuantisedBase
from drivetrain.errors import problem
from drivetrain.models.linear_layers import check_groups, plain_layers, replace
from drivetrain.models.quantised_linear import QuantisedLinear, as_floats, share_of, share_of_rows
from drivetrain.models.torchao_base import Int4Linear, TorchaoInt8Linear
from drivetrain.runtime.library_messages import hush

BLOCK = 64  # weights with one scale
SCALES_BLOCK = 256  # scales with one scale, of double quantisation


def quantise(model: nn.Module, config: QuantisedBase, skip: Collection[str] = ()) -> list[str]:
    """Replaces the linear layers in place, one after the other. Returns their names. Raises UserError if there are
    none.

    skip: names of modules that are not replaced, with all within them; further exceptions: linear_layers.py.
    """
    check_installed(config)
    if config.library == "bitsandbytes":
        _bitsandbytes()  # brings the operators, also where nothing is packed
    layers = plain_layers(model, skip)
    if not layers:
        why = f"{type(model).__name__} has no linear layers to quantise"
        raise problem("quantised_base", why, "leave it out, or let fewer modules be trained whole")
    if config.format == "int4":
        check_groups(model, layers, config.group_size, "quantised_base")
    for names in layers:
        weight = model.get_parameter(f"{names[0]}.weight")
        if not weight.is_meta and not torch.isfinite(weight).all():
            raise problem("quantised_base", f"{names[0]} has weights that are not finite", "take a base without them")
        del weight  # or it would outlive its layer
        replace(model, names, lambda linear: _made(linear, config))
    return [name for names in layers for name in names]


def weights_of_codes(model: nn.Module) -> dict[int, int]:
    """Returns id of a parameter of bytes → weights that each of its numbers stands for; none if they are scales."""
    found: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            found |= {id(module.weight): module.weights_a_code, id(module.scales): 0}
    return found


def check_installed(config: QuantisedBase) -> None:
    """Raises UserError if the library of the format is not installed."""
    if find_spec(config.library) is None:
        extra = {"bitsandbytes": "bitsandbytes", "torchao": "lowbit"}[config.library]
        why = f"{config.format} needs {config.library}, which is not installed"
        raise problem("quantised_base", why, f"pip install 'drivetrain[{extra}]'")


def _made(linear: nn.Linear, config: QuantisedBase) -> QuantisedLinear:
    if config.format == "nf4":
        return Nf4Linear(linear, config.double)
    if config.format == "int4":
        return Int4Linear(linear, config.group_size)
    return Int8Linear(linear) if config.format == "int8" else TorchaoInt8Linear(linear)


class Nf4Linear(QuantisedLinear):
    """A layer in NF4. codes: (ceil(out * in / 2), 1) uint8, two weights a byte, as bitsandbytes lays them out. scales:
    an fp32 for each block; if double, fp32 numbers (the blocks' mean scale, one scale for 256 blocks), then a byte for
    each block."""

    weights_a_code = 2

    def __init__(self, linear: nn.Linear, double: bool) -> None:
        self._double = double
        self._rows, self._rank, self._ranks = 1, 0, 1  # whose share of each of so many rows of blocks is here
        super().__init__(linear)

    @property
    def _num_blocks(self) -> int:
        return math.ceil(self.in_features * self.out_features / BLOCK)

    @property
    def _num_floats(self) -> int:
        return 1 + math.ceil(self._num_blocks * self._ranks / SCALES_BLOCK) if self._double else self._num_blocks

    def _layout(self) -> tuple[Tensor, Tensor]:
        codes = math.ceil(self.in_features * self.out_features / 2)
        scales = 4 * self._num_floats + (self._num_blocks if self._double else 0)
        empty = functools.partial(torch.empty, dtype=torch.uint8, device="meta")
        return empty(codes, 1), empty(scales)

    def packed(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        codes, state = _bitsandbytes().quantize_4bit(
            weight, blocksize=BLOCK, quant_type="nf4", compress_statistics=self._double
        )
        if not self._double:
            return codes, state.absmax.view(torch.uint8)
        floats = torch.cat([state.offset.view(1), state.state2.absmax])
        return codes, torch.cat([floats.view(torch.uint8), state.absmax])

    def whole_because(self, dim: int, ranks: int) -> str | None:
        run = self.in_features // ranks if dim else self.out_features // ranks * self.in_features
        return None if run % BLOCK == 0 else f"each {BLOCK} weights have one scale, and {run} lie together"

    def _share(self, dim: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """Returns a rank's share. Blocks lie in the order of the rows. The few scales of scales stay whole: ranks share
        some of them."""
        mine = functools.partial(share_of, rows=self.out_features if dim else 1, rank=rank, ranks=ranks)
        floats = self.scales[: 4 * self._num_floats]
        if self._double:
            scales = torch.cat([floats, mine(self.scales[4 * self._num_floats :])])
        else:
            scales = mine(as_floats(floats)).view(torch.uint8)
        self._rows, self._rank, self._ranks = self.out_features if dim else 1, rank, ranks
        return mine(self.weight)[:, None], scales

    def unpacked(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Unpacks as one long row: with rows that blocks do not fill, bitsandbytes' kernel for AVX-512 takes the wrong
        scales."""
        shape, absmax = [1, 2 * codes.numel()], self._absmax(scales)
        row: Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(codes, absmax, BLOCK, "nf4", shape, dtype)
        return row[0, : self.out_features * self.in_features].view(self.out_features, self.in_features)

    def _absmax(self, scales: Tensor) -> Tensor:
        """Returns each block's largest absolute value, (blocks,) fp32."""
        floats = as_floats(scales[: 4 * self._num_floats])
        if not self._double:
            return floats
        table = _table(scales.device)
        if self._ranks > 1:
            found = table[scales[4 * self._num_floats :].int()]
            return floats[0] + found * floats[1:][self._scales_of_scales(scales.device)]
        return floats[0] + torch.ops.bitsandbytes.dequantize_blockwise.default(
            scales[4 * self._num_floats :], floats[1:], table, SCALES_BLOCK, torch.float32
        )

    def _scales_of_scales(self, device: torch.device) -> Tensor:
        """Returns for each block here the number of its block of scales in the whole, (blocks,)."""
        own = torch.arange(self._num_blocks, device=device)
        width = self._num_blocks // self._rows
        return ((own // width * self._ranks + self._rank) * width + own % width) // SCALES_BLOCK


class Int8Linear(QuantisedLinear):
    """A layer in int8. codes: (out, in) int8. scales: for each row an fp32, which 127 stands for."""

    def _layout(self) -> tuple[Tensor, Tensor]:
        codes = torch.empty(self.out_features, self.in_features, dtype=torch.int8, device="meta")
        return codes, torch.empty(4 * self.out_features, dtype=torch.uint8, device="meta")

    def packed(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales, _ = _bitsandbytes().int8_vectorwise_quant(weight.half())
        return codes, scales.view(torch.uint8)

    def unpacked(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return (codes * (as_floats(scales) / 127)[:, None]).to(dtype)

    def _share(self, dim: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        return share_of_rows(self.weight, self.scales, dim, rank, ranks)


def _bitsandbytes() -> Any:
    hush()
    import bitsandbytes.functional

    return bitsandbytes.functional


@torch.compiler.assume_constant_result
def _table(device: torch.device) -> Tensor:
    """Returns the 256 values that codes of scales point into (Dettmers et al. 2022, "8-bit Optimizers")."""
    return _made_table(device)


@functools.cache
def _made_table(device: torch.device) -> Tensor:
    from drivetrain.distributed.real_numbers import real_numbers

    with real_numbers():
        table: Tensor = _bitsandbytes().create_dynamic_map().to(device)
    return table
