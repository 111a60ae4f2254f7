"""Ways of GPUs to compute attention over sequences that lie end to end: which one works, and how each is called."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

from drivetrain.memory.transfers import on_host, remember, sent
from drivetrain.models.planned_device import planned_machine

# torch 2.11's kernel accepts keys that have fewer heads than the queries; later versions ask for enable_gqa=True then
ASKS_FOR_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
# in the order in which they are taken. PyTorch's own comes first: its kernel is flash-attn's, and it is an operator, so
# that a compiled block stays one graph. FlexAttention breaks it in every layer, and its mask of blocks grows as T x T.
# cuDNN's kernel is left out of `each_in_its_row`: it builds a graph for every new shape (pytorch/pytorch#155958), and
# the number of sequences and the longest of them are other ones in each batch.
ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
MULTIPLE = 8  # of which rows' lengths are one: masks then need no copy for the kernel
CHOICES = {"auto": ("varlen", "flash", "flex"), "flash": ("flash", "varlen"), "flex": ("flex",)}


def kernel_of(choice: str, dtype: torch.dtype, dropout: float, is_ampere: bool, width: int) -> str:
    """Returns the first of the choice's kernels for GPUs that works; if none does, "sdpa": see `each_in_its_row`.

    width: of a head. Those of flash-attn take multiples of 8 up to 256, FlexAttention's compiler none below 16.
    """
    half = dtype in (torch.float16, torch.bfloat16) and is_ampere and width % 8 == 0 and width <= 256
    able = {
        "varlen": half and not dropout and _has_varlen(),
        "flash": half and find_spec("flash_attn") is not None,
        "flex": not dropout and width >= 16,
    }
    return next((kernel for kernel in CHOICES.get(choice, ()) if able[kernel]), "sdpa")


def flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, window: int | None, looks_back: bool, **how: Any
) -> Tensor:
    """Runs flash-attn's kernel for sequences end to end. Written from its documented signature; not yet run."""
    kernel = import_module("flash_attn").flash_attn_varlen_func
    starts, longest = _starts(bounds, query.shape[2]), bounds.shape[2]
    found: Tensor = kernel(
        *_end_to_end(query, key, value),
        *(starts, starts, longest, longest),
        dropout_p=how.get("dropout", 0.0),
        softmax_scale=how.get("scaling"),
        causal=looks_back,
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )
    return found.unflatten(0, (query.shape[0], query.shape[2]))


def varlen_of_torch(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, window: int | None, looks_back: bool, **how: Any
) -> Tensor:
    """Runs PyTorch's own kernel, which has no dropout."""
    kernel: Any = varlen.varlen_attn
    starts, longest = _starts(bounds, query.shape[2]), bounds.shape[2]
    if planned_machine() is not None:  # FLOPs are counted by its numbers
        remember(starts, _numbers_of_starts(bounds, query.shape[2]))
    grouped = {"enable_gqa": query.shape[1] != key.shape[1]} if ASKS_FOR_GROUPS else {}
    found: Tensor = kernel(
        *_end_to_end(query, key, value),
        *(starts, starts, longest, longest),
        scale=how.get("scaling"),
        window_size=(-1 if window is None else window - 1, 0 if looks_back else -1),
        **grouped,
    )
    return found.unflatten(0, (query.shape[0], query.shape[2]))


@functools.cache
def _has_varlen() -> bool:
    """Returns whether PyTorch's kernel can do it: its first releases had no windows."""
    return {"window_size", "scale"} <= inspect.signature(varlen.varlen_attn).parameters.keys()


def flex(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, how: dict[str, Any]) -> Tensor:
    from transformers.integrations.flex_attention import flex_attention_forward

    found: Tensor = flex_attention_forward(module, query, key, value, mask, **how)[0]
    return found


def block_mask(bounds: Tensor, length: int, window: int | None, looks_back: bool) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    place = torch.arange(length, device=bounds.device, dtype=bounds.dtype).expand(len(bounds), -1).contiguous()
    sequence = torch.searchsorted(bounds[:, 0, 0, 1:].contiguous(), place, right=True)

    def visible(row: Tensor, head: Tensor, at: Tensor, seen: Tensor) -> Tensor:
        del head
        near = at >= seen if looks_back else at == at
        if window is not None:
            near = near & (at - seen < window)
        return near & (sequence[row, at] == sequence[row, seen])

    return create_block_mask(visible, len(bounds), None, length, length, device=bounds.device)


@dataclass(frozen=True)
class Apart:
    """Rows of one sequence each, (N, L), as long as the longest.

    places: (B * T,) int64, where each position of the packed rows goes, counted through these rows. real: (N, 1, 1, L)
    bool, whether a position is of the sequence; None where no row is filled up.
    """

    number: int
    length: int
    places: Tensor
    real: Tensor | None

    def spread(self, packed: Tensor) -> Tensor:
        """Returns (N, heads, L, width) with zeros where rows are filled up. packed: (B, heads, T, width)."""
        [flat] = _end_to_end(packed)
        rows = flat.new_zeros(self.number * self.length, *flat.shape[1:]).index_copy(0, self.places, flat)
        return rows.unflatten(0, (self.number, self.length)).transpose(1, 2)

    def gather(self, rows: Tensor, like: Tensor) -> Tensor:
        """Returns (B, T, heads, width), without what rows were filled up with. rows: (N, L, heads, width). like: (B,
        heads, T, width)."""
        flat = rows.flatten(0, 1).index_select(0, self.places)
        return flat.unflatten(0, (like.shape[0], like.shape[2]))


def apart(bounds: Tensor) -> Apart:
    """Returns how the sequences between these boundaries are laid into rows of their own."""
    lengths = np.diff(on_host(bounds)[:, 0, 0]).ravel()  # those of one row follow those of the row before
    lengths = lengths[lengths > 0]
    length = -(-int(lengths.max()) // MULTIPLE) * MULTIPLE
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    places = sequence * length + np.arange(len(sequence)) - starts
    real = np.arange(length) < lengths[:, None]
    mask = None if real.all() else sent(torch.from_numpy(real[:, None, None]), bounds.device)
    return Apart(len(lengths), length, sent(torch.from_numpy(places), bounds.device), mask)


def each_in_its_row(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Apart,
    mask: Tensor | None,
    how: dict[str, Any],
) -> Tensor:
    """Applies Transformers' sdpa to all sequences at once, each in a row of its own: only attention computes what rows
    are filled up with. Works in every dtype and with dropout, and starts as few kernels as a padded batch.

    mask: which positions see which, (1, 1, L, L) or (N, 1, 1, L); None where attention looks back alone, and so never
    sees what follows a sequence. Returns (B, T, heads, width).
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    with sdpa_kernel(ANY_SHAPE):
        found: Tensor = sdpa_attention_forward(module, *map(rows.spread, (query, key, value)), mask, **how)[0]
    return rows.gather(found, query)


def _end_to_end(*tensors: Tensor) -> list[Tensor]:
    """Reshapes (B, heads, T, width) → (B * T, heads, width)."""
    return [tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors]


def _numbers_of_starts(bounds: Tensor, length: int) -> np.ndarray:
    own = on_host(bounds)[:, 0, 0, :-1]
    rows = np.arange(len(own), dtype=np.int32)[:, None] * length
    return np.append(own + rows, np.int32(len(own) * length))


def _starts(bounds: Tensor, length: int) -> Tensor:
    """Returns where sequences begin in all rows end to end, and the end: int32. Some may have length 0."""
    rows = torch.arange(len(bounds), device=bounds.device, dtype=torch.int32)[:, None] * length
    starts = (bounds[:, 0, 0, :-1] + rows).flatten()
    return torch.cat([starts, starts.new_full((1,), len(bounds) * length)])
