"""Transformers' attention by PyTorch's `scaled_dot_product_attention`, with what its kernels lack made up for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.memory.transfers import on_host
from drivetrain.models.planned_device import kind_of_device


def usual(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: dict[str, Any]
) -> Tensor:
    """Returns (B, T, heads, width). query: (B, heads, T, width); key and value with their own heads.

    Numbers of 16 bits that are trained with are computed with in fp32 on a CPU, and rounded afterwards.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if is_half_on_cpu(value) and torch.is_grad_enabled() and not how.get("dropout"):
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
        with torch.autocast("cpu", enabled=False):
            parts = [tensor.float() for tensor in (query, key, value)]
            whole: Tensor = sdpa_attention_forward(module, *parts, mask, **how)[0]
        return whole.to(value.dtype)
    key, value = _each_its_own(query, key, value, mask)
    found: Tensor = sdpa_attention_forward(module, query, key, value, mask, **how)[0]
    return found


@torch.compiler.disable
def one_by_one(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    band: Callable[[int, int | None], Tensor | None],
    how: dict[str, Any],
) -> Tensor:
    """Applies it to each sequence alone. band: length and window → mask."""
    window, rows = how.get("sliding_window"), []
    for row, lengths in enumerate(np.diff(on_host(bounds)[:, 0, 0]).tolist()):
        pieces = [length for length in lengths if length]
        whole = (tensor if len(tensor) == 1 else tensor[row : row + 1] for tensor in (query, key, value))
        parts = (tensor.split(pieces, dim=2) for tensor in whole)
        each = zip(pieces, *parts, strict=True)
        found = [
            usual(module, own, its_key, its_value, band(size, window), how) for size, own, its_key, its_value in each
        ]
        rows.append(torch.cat(found, dim=1))
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def is_half_on_cpu(tensor: Tensor) -> bool:
    """Returns whether it has 16 bits, with which PyTorch's kernel for a CPU compiles code for each length
    (`sequence_operator`)."""
    return tensor.dtype in (torch.bfloat16, torch.float16) and kind_of_device(tensor) == "cpu"


def _each_its_own(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Repeats keys and values for each head of the queries where a GPU computes in fp32: its kernel for groups of heads
    takes 16 bits alone, and without one PyTorch makes the scores of all pairs of positions. Under a mask, for
    wider heads and for a single query Transformers repeats them itself."""
    own = mask is None and query.shape[2] > 1 and key.shape[3] == value.shape[3] <= 256
    groups = query.shape[1] // key.shape[1]
    if groups == 1 or not own or query.dtype != torch.float32 or kind_of_device(query) != "cuda" or query.is_meta:
        return key, value
    if torch.is_autocast_enabled(query.device.type):
        return key, value
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
