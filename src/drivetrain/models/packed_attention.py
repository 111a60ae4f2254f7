"""Attention for several sequences laid end to end in one row, none of which sees another: no padding is computed.

Positions that begin again at 0 mark where sequences begin, as everywhere in Transformers, which makes a mask over all
pairs of positions from them. Here a hook before the model makes boundaries from them, and passes them as the attention
mask: in four dimensions, since Transformers passes such a mask to each layer's attention unchanged. So the boundaries
are an input like any other: wrapped models, recompute and micro-batches in flight under a pipeline need nothing more.

On a CPU each sequence is a call of its own, all of them one operator where blocks are compiled. On alpaca's lengths
(2,048 tokens in a row, 8 heads of 64) forward and backward took a ninth of what they take under a mask over all pairs;
calls for several sequences of like length, padded or not, took two to five times as long as single ones, for their
gathering.

Answers to one prompt may share it (`data.branches`), on a CPU alone so far: each of them is then computed against its
prompt's keys and against its own (`sequence_operator`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from drivetrain.data.branches import begins_of
from drivetrain.data.row_shape import Rows
from drivetrain.errors import RunError
from drivetrain.memory.transfers import on_host, remember, sent
from drivetrain.models import packed_kernels
from drivetrain.models.packing_trial import Windows, tried, why_not, why_not_tried
from drivetrain.models.planned_device import kind_of_device, planned_machine
from drivetrain.models.read_places import at_places, keys_seen, places_read
from drivetrain.models.sequence_operator import attend_apart
from drivetrain.models.usual_attention import is_half_on_cpu, one_by_one, usual

NAME = "drivetrain_packed"  # in Transformers' tables of attention implementations and of masks
Warn = Callable[[str], None]
LOG = logging.getLogger(__name__)
AMPERE = (8, 0)  # the compute capability from which there are kernels for 16 bits
UNKNOWN = ("softcap", "s_aux", "position_bias")  # what some models ask of attention beside a window


class PackedAttention:
    """Transformers' attention function over packed rows; for rows that hold one sequence each, the usual sdpa."""

    def __init__(self, choice: str) -> None:
        self._choice = choice
        self._masks: Any = WeakTensorKeyDictionary()  # boundaries → masks made for them, for all layers
        self.windows: Windows = {}  # of each layer that has run
        self.rows: Callable[[], Rows | None] = _no_rows  # which packed rows are filled up to just now

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **how: Any
    ) -> tuple[Tensor, None]:
        """Returns (B, T, heads, width). query: (B, heads, T, width), key and value with their own heads."""
        window, dropout = how.get("sliding_window"), how.get("dropout", 0.0)
        if not torch.compiler.is_compiling():  # layers differ in their number, and would be compiled one by one
            self.windows[getattr(module, "layer_idx", None)] = window
        asked = [name for name in UNKNOWN if how.get(name) is not None]
        looks_back = bool(getattr(module, "is_causal", True))  # as Transformers' sdpa asks; encoders look both ways
        by_operator = looks_back and not dropout and not asked and are_bounds(attention_mask) and is_half_on_cpu(value)
        if not (are_bounds(attention_mask) and attention_mask.shape[3] > 2) and not by_operator:
            mask = attention_mask
            if are_bounds(mask):  # of one sequence in each row
                mask = self._mask(_band, attention_mask, query.shape[2], window)
            return usual(module, query, key, value, mask, how), None
        if asked:
            raise RunError(f"packed sequences: {type(module).__name__} asks for {', '.join(asked)} in its attention")
        read = places_read(module, query.shape[::2]) if looks_back and not dropout else None
        if read is not None:
            seen = keys_seen(attention_mask, read, window)
            found = usual(module, query.index_select(2, read), key, value, seen[None, None], how)
            return at_places(found[0], read, query.shape[::2]), None
        if _is_on_gpu(query) or kind_of_device(query) == "cuda":  # the second: one that is planned for
            query, key, value = _as_autocast_would(query, key, value)
            return self._on_gpu(module, query, key, value, attention_mask, looks_back, how), None
        branches = attention_mask.shape[1] == 2
        if branches and (dropout or not looks_back):
            raise RunError("answers that share a prompt: there is no attention with dropout, or that looks ahead")
        compiled = torch.compiler.is_compiling() and not dropout and looks_back and query.device.type == "cpu"
        if branches or by_operator or compiled:
            query, key, value = _as_autocast_would(query, key, value)
            return attend_apart(query, key, value, attention_mask, window, how.get("scaling")), None
        band = functools.partial(self._mask, _band, attention_mask)
        return one_by_one(module, query, key, value, attention_mask, band, how), None

    def _on_gpu(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor,
        looks_back: bool,
        how: dict[str, Any],
    ) -> Tensor:
        kernel, window = self._kernel(query, how.get("dropout", 0.0)), how.get("sliding_window")
        match kernel:
            case "flash":
                return packed_kernels.flash(query, key, value, bounds, window, looks_back, **how)
            case "varlen":
                return packed_kernels.varlen_of_torch(query, key, value, bounds, window, looks_back, **how)
            case "flex" if looks_back:  # for texts it would compile at each batch: their rows have ever other lengths
                mask = self._mask(packed_kernels.block_mask, bounds, query.shape[2], window, looks_back)
                return packed_kernels.flex(module, query, key, value, mask, how)
        return self._each_in_its_row(module, query, key, value, bounds, looks_back, how)

    def _kernel(self, query: Tensor, dropout: float) -> str:
        """Returns the kernel of the GPU here. For a GPU that is planned for, PyTorch's stands in for FlexAttention and
        flash-attn, which a trace cannot run without numbers: each is one call a layer, and they keep as much."""
        if _is_on_gpu(query):
            return _kernel_here(self._choice, query.dtype, dropout, query.device, query.shape[-1])
        machine = planned_machine()
        capable = machine is not None and (machine.compute_capability or (0, 0)) >= AMPERE
        kernel = packed_kernels.kernel_of(self._choice, query.dtype, dropout, capable, query.shape[-1])
        return "sdpa" if kernel == "sdpa" else "varlen"

    @torch.compiler.disable
    def _each_in_its_row(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor,
        looks_back: bool,
        how: dict[str, Any],
    ) -> Tensor:
        rows = self._mask(packed_kernels.apart, bounds)
        band = self._mask(_band, bounds, rows.length, how.get("sliding_window")) if looks_back else rows.real
        return packed_kernels.each_in_its_row(module, query, key, value, rows, band, how)

    def _mask(self, make: Callable[..., Any], bounds: Tensor, *of: Any) -> Any:
        """Returns make(bounds, *of), made once; under a compiler in each layer, which then is one graph."""
        if torch.compiler.is_compiling() and make is _band:
            return make(bounds, *of)
        made = self._masks.setdefault(bounds, {})
        if (make, *of) not in made:
            made[make, *of] = make(bounds, *of)
        return made[make, *of]


def use_packed_attention(
    model: nn.Module, choice: str, warn: Warn = LOG.warning, several: bool = True
) -> PackedAttention | None:
    """Lets rows of a batch hold several sequences, whose position_ids begin at 0, without an attention_mask.

    Returns None if the model cannot take them, and leaves it unchanged; `warn` gets the reason.

    several: False if each row holds one sequence, which avoids a wait: Transformers reads positions on the device to
    see whether sequences are packed, unless it gets a mask in four dimensions.

    model: before any wrapping. If it has weights, two sequences are run packed and alone, to check that nothing else in
    the model mixes them (convolutions, recurrences, positions it counts itself). choice: auto, sdpa, flash or flex, of
    the kernels for a GPU; a CPU has one. eager packs nothing.
    """
    reason = why_not_tried(model, choice)
    if reason is None:
        attention, before = PackedAttention(choice), model.config._attn_implementation  # type: ignore[union-attr]
        alone = tried(model, together=False)
        register(attention)
        model.set_attn_implementation(NAME)  # type: ignore[operator]

        def with_bounds(model: nn.Module, args: Any, inputs: dict[str, Any]) -> Any:
            return _with_bounds(attention.rows() if several else None, several, model, args, inputs)

        hook = model.register_forward_pre_hook(torch.compiler.disable(with_bounds), with_kwargs=True)
        reason = why_not(model, attention.windows, alone, tried(model, together=several))
        if reason is None:
            return attention
        hook.remove()
        model.set_attn_implementation(before)  # type: ignore[operator]
    warn(f"sequences cannot be packed: {reason}")
    return None


def register(attention: PackedAttention) -> None:
    """Registers the attention with Transformers by NAME."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _no_rows() -> None:
    return None


def _with_bounds(rows: Rows | None, several: bool, model: nn.Module, args: Any, inputs: dict[str, Any]) -> Any:
    positions = inputs.get("position_ids")
    if positions is None or inputs.get("attention_mask") is not None or inputs.get("past_key_values") is not None:
        return None
    if model.config._attn_implementation != NAME:  # type: ignore[union-attr]
        return None  # context parallel has put its own in the place
    bounds = bounds_of(positions, rows) if several else None
    return args, {**inputs, "attention_mask": _one_each(positions) if bounds is None else bounds}


def _one_each(positions: Tensor) -> Tensor:
    """Returns boundaries of rows that hold one sequence each: (B, 1, T, 2)."""
    rows, length = positions.shape
    table = np.tile(np.array([0, length], dtype=np.int32), (rows, 1, 1, 1))
    bounds = (torch.arange(2, dtype=torch.int32, device=positions.device) * length).expand(rows, 1, length, 2)
    remember(bounds, table)
    return bounds


def bounds_of(positions: Tensor, fixed: Rows | None = None) -> Tensor | None:
    """Returns where sequences begin, and the end of the row, T: (B, 1, longest, S + 1) int32, constant in the third
    dimension, which takes no memory and gives every layer the longest sequence on the host. Rows that hold fewer than S
    are filled with T. None if each row holds one.

    Where answers share a prompt (`data.branches`), branches count as sequences and there are two such tables, (B, 2,
    longest, S + 1): the second has the first position of each sequence, which is above 0 for a branch.

    positions: (B, T). fixed: the shape of rows, for which `longest` and S are the most that they can hold, so that
    boundaries have one shape.
    """
    own_positions = on_host(positions)
    begins = begins_of(own_positions)[:, 1:]
    rows, places = begins.nonzero()
    if not len(rows):
        return None
    number = begins.cumsum(1)[rows, places]
    width, most = int(number.max()) + 1, 0
    if fixed is not None and positions.shape[1] == fixed.tokens and width <= fixed.sequences:
        width, most = fixed.sequences, fixed.longest
    table = np.full((len(positions), width + 1), positions.shape[1], dtype=np.int32)
    table[:, 0] = 0
    table[rows, number] = places + 1
    longest = max(most, int(np.diff(table).max()))
    own = table[:, None, None]
    firsts = np.zeros_like(table)
    firsts[rows, number] = own_positions[rows, places + 1]
    if firsts.any():
        own = np.concatenate([own, firsts[:, None, None]], 1)
    bounds = sent(torch.from_numpy(own), positions.device).expand(-1, -1, longest, -1)
    remember(bounds, own)
    return bounds


def bounds_of_lengths(lengths: Tensor) -> Tensor:
    """Returns `bounds_of` one row that holds sequences of these lengths, (S,): (1, 1, longest, S + 1)."""
    own = on_host(lengths)
    table = np.concatenate([[0], own.cumsum()]).astype(np.int32)[None, None, None]
    bounds = sent(torch.from_numpy(table), lengths.device).expand(-1, -1, int(own.max()), -1)
    remember(bounds, table)
    return bounds


# --- kernels ----------------------------------------------------------------------------------------------------------


def are_bounds(mask: Any) -> TypeGuard[Tensor]:
    """Returns whether a mask holds boundaries of packed rows: Transformers' masks are boolean or floating."""
    return isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.ndim == 4


@torch.compiler.assume_constant_result
def _kernel_here(choice: str, dtype: torch.dtype, dropout: float, device: torch.device, width: int) -> str:
    return packed_kernels.kernel_of(choice, dtype, dropout, _is_ampere(device), width)


def _band(bounds: Tensor, length: int, window: int | None) -> Tensor | None:
    """Returns which positions see which, (1, 1, L, L); None for plain causal attention."""
    if window is None or length <= window:
        return None
    place = torch.arange(length, device=bounds.device)
    behind = place[:, None] - place[None]
    return ((behind >= 0) & (behind < window))[None, None]


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


@functools.cache
def _is_ampere(device: torch.device) -> bool:
    """Returns whether it is an NVIDIA GPU of compute capability 8.0 or newer, as flash-attn's and PyTorch's kernels for
    16 bits need. ROCm's torch counts capabilities of its own (gfx90a as 9.0)."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= AMPERE


def _as_autocast_would(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts like autocast: queries and keys come out of rotary positions in fp32 while values are in 16 bits; autocast
    casts them only for PyTorch's own attention."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)
