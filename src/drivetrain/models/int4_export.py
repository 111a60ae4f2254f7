"""Packs a model's linear layers in 4 bits, in the form that compressed-tensors calls pack-quantized.

Plain Transformers loads it with that package, and vLLM without. Each GROUP of a row's weights has one scale, and each
weight is a whole number from -8 to 7 times it. No data are needed to calibrate: the scale of a group is the one of a
few below its largest weight that leaves the smallest squared error, which costs the largest weights a little and gains
for the others.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.models.linear_layers import replace

GROUP = 32  # weights with one scale
LEAST, MOST = -8, 7
SHRUNK = tuple(1.0 - 0.04 * number for number in range(11))  # of the scale that reaches a group's largest weight


def pack(model: Any, names: list[list[str]]) -> None:
    """Replaces the layers in place by their codes and scales, which save_pretrained writes, and adds to the model's
    config how they are read. names: all names of each layer."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")
    whole = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    for group in names:
        replace(model, group, functools.partial(_Packed, scheme=scheme))
    packed = {name for group in names for name in group}
    model.config.quantization_config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme.model_dump()},
        "ignore": [name for name in whole if name not in packed],
    }


class _Packed(nn.Module):
    """The tensors of a packed layer, by compressed-tensors' names; it computes nothing."""

    def __init__(self, linear: nn.Linear, scheme: Any) -> None:
        super().__init__()
        from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor

        weight = linear.weight.detach()
        named = {"weight": weight, "weight_scale": best_scales(weight).to(weight.dtype)}
        for name, tensor in PackedQuantizationCompressor.compress(named, scheme).items():
            self.register_buffer(name, tensor)
        self.bias = linear.bias


def best_scales(weight: Tensor) -> Tensor:
    """Returns each group's scale, (out, in / GROUP) in fp32, for a weight (out, in)."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / ((MOST - LEAST) / 2)
    best, least = largest, torch.full_like(largest, float("inf"))
    for share in SHRUNK:
        scale = largest * share
        error = (groups - (groups / scale).round().clamp(LEAST, MOST) * scale).square().sum(-1, keepdim=True)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best.squeeze(-1)
