"""Forward passes of a model in this process, and the store of rows that suits it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import psutil
import torch
from torch import Tensor, nn

from drivetrain.errors import last_line
from drivetrain.generation.row_stores import Batch, CachedRows, Choose, Forward, RowStore, WholeRows
from drivetrain.generation.sampling import Choice
from drivetrain.models.merged_adapters import is_whole

if TYPE_CHECKING:
    from drivetrain.generation.short_step import ShortStep

LOG = logging.getLogger(__name__)
CACHE_SHARE = 0.5  # of the memory that is free
# model → whether its cache works, and its short step, which is tried once and not for each batch of a training
_WORKS: WeakKeyDictionary[nn.Module, tuple[bool, bool]] = WeakKeyDictionary()
EXACT, ROUNDED = 1e-3, 5e-2  # relative differences of logits in 32 and in 16 bits
TRIED_CELLS = 2**10  # room for their keys and values
TRIED = ((3, 1, 4, 1, 5), (2, 7, 1))  # prompts of two lengths, with which a model's cache is tried


class LocalForward:
    """Runs a model that is whole in this process. prepare: called before each pass, to switch adapters."""

    def __init__(self, model: nn.Module, prepare: Callable[[], None] | None = None) -> None:
        self._model, self._prepare = model, prepare
        self._device = next(model.parameters()).device

    @torch.no_grad()
    def __call__(self, batch: Batch, work: Callable[[nn.Module, Batch], Tensor], choose: Choose) -> list[Choice]:
        if self._prepare is not None:
            self._prepare()
        return choose(work(self._model, {name: tensor.to(self._device) for name, tensor in batch.items()}))


def stores_of(forward: Forward, model: Any, recorded_cells: int = 0) -> Callable[[Forward], RowStore]:
    """Returns what makes empty stores for a model, over a forward pass: with a cache where one works, which is tried.

    model: before any wrapping, one of Transformers' or PEFT's (with virtual tokens, which have no cache here).
    recorded_cells: positions whose keys and values recorded steps may hold, for each store, on a GPU; 0 records none.
    """
    from drivetrain.generation.cache import windows_of  # imports Transformers, as building its model did

    windows = windows_of(model.config) if is_whole(model) else None
    if model not in _WORKS:
        _WORKS[model] = (False, False) if windows is None else _tried(forward, model, windows)
        if not _WORKS[model][0]:
            LOG.warning("%s has no cache that works here: each token runs the whole sequence", type(model).__name__)
    has_cache, has_step = _WORKS[model]
    if windows is None or not has_cache:
        return WholeRows
    records = bool(recorded_cells) and _can_record(model) and fixed_steps_agree(forward, model, windows)
    short = _step_of(model) if has_step else None

    def store(forward: Forward) -> RowStore:
        from drivetrain.generation.recorded_steps import RecordedSteps

        recorded = RecordedSteps(recorded_cells, _tolerance(model)) if records else None
        return CachedRows(forward, model, windows, recorded, short)

    return store


def fixed_steps_agree(forward: Forward, model: Any, windows: Sequence[int | None]) -> bool:
    """Returns whether a step over buffers of fixed sizes gives the logits of whole sequences: some models count
    positions by the mask, and take none for each row."""
    from drivetrain.generation.recorded_steps import RecordedSteps, unrecorded

    steps = RecordedSteps(TRIED_CELLS, _tolerance(model), unrecorded)
    try:
        return _agree(CachedRows(forward, model, windows, steps), WholeRows(forward), _tolerance(model))
    except Exception as error:  # each architecture's own
        LOG.info("steps of %s are not recorded: %s", type(model).__name__, last_line(error))
        return False


def _tried(forward: Forward, model: Any, windows: Sequence[int | None]) -> tuple[bool, bool]:
    """Returns whether the model's cache gives the logits of whole sequences, and whether its short step does."""
    whole, tolerance = WholeRows(forward), _tolerance(model)
    try:
        step = _step_of(model)
        if step is not None and _agree(CachedRows(forward, model, windows, short=step), whole, tolerance):
            return True, True
        why = None if step is None else "it gave other logits"
    except Exception as error:  # blocks of another version of Transformers
        why = last_line(error)
    if why is not None:
        LOG.info("%s has no short step: %s", type(model).__name__, why)
    return _agree(CachedRows(forward, model, windows), whole, tolerance), False


def _step_of(model: Any) -> ShortStep | None:
    from drivetrain.generation.short_step import short_step_of

    return short_step_of(model)


def _can_record(model: Any) -> bool:
    """Returns whether a step of the model depends on nothing but tensors on a GPU: its positions are given, and its
    attention takes a mask for each row as it is."""
    parameters = inspect.signature(model.forward).parameters
    by_mask = model.config.get_text_config()._attn_implementation == "sdpa"
    return next(model.parameters()).is_cuda and by_mask and "position_ids" in parameters


def cells_of(model: Any) -> int:
    """Returns the number of positions whose keys and values fit into CACHE_SHARE of the free memory."""
    weight = model.get_input_embeddings().weight
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * width
    bytes_each = kept * weight.element_size()
    free = torch.cuda.mem_get_info(weight.device)[0] if weight.is_cuda else psutil.virtual_memory().available
    return max(1, int(CACHE_SHARE * free) // bytes_each)


def _agree(cached: CachedRows, whole: WholeRows, tolerance: float) -> bool:
    """Returns whether a store gives the logits of another for prompts of two lengths and a token behind each."""
    found = []
    for each in (cached.new(), whole.new()):
        seen: list[Tensor] = []

        def see(logits: Tensor, seen: list[Tensor] = seen) -> list[Choice]:
            seen.append(logits)
            return [Choice(0)] * len(logits)

        each.start(TRIED, see)
        each.next([6] * len(TRIED), see)
        found.append(torch.stack(seen))
    if found[1].dtype != torch.float32:  # autocast over parameters of 32 bits, also one within the model's forward pass
        tolerance = max(tolerance, ROUNDED)
    one, other = (each.float() for each in found)
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


def _tolerance(model: nn.Module) -> float:
    """Returns the relative difference that rounding explains."""
    return EXACT if all(each.dtype == torch.float32 for each in model.parameters()) else ROUNDED
