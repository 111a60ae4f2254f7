"""Context parallel: each rank has a part of every sequence; for attention they exchange parts for heads.

Jacobs et al. 2023, "DeepSpeed Ulysses": before attention an all-to-all gives each rank whole sequences of some heads,
after it another gives back its part of all heads. It needs nothing of the attention kernel, so it works wherever a
collective does; the number of heads bounds the degree.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.config.engines.mesh import HEADS
from drivetrain.errors import problem
from drivetrain.memory.transfers import on_host, remember
from drivetrain.workloads.base import Batch

NUMBERS = itertools.count()  # Transformers' table of attention implementations is the process's: each has its name
# what Transformers' layers hand to attention and this one honours, or which does not change it
KNOWN = {"dropout", "scaling", "is_causal", "sliding_window"}
WITHOUT_EFFECT = {"position_ids", "cache_position", "use_cache", "output_attentions", "output_router_logits"}


class _AllToAll(torch.autograd.Function):
    """Divides dimension `give` among the ranks, and joins what comes from them in dimension `join`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, give: int, join: int, group: dist.ProcessGroup) -> Tensor:
        ctx.way = give, join, group
        pieces = [piece.contiguous() for piece in tensor.chunk(dist.get_world_size(group), give)]
        sent = torch.stack(pieces)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        return torch.cat(list(got), dim=join)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        give, join, group = ctx.way
        return _AllToAll.apply(gradients[0], join, give, group), None, None, None


class Ulysses:
    """Transformers' attention function over a group of ranks; for whole sequences, its usual one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.has_whole_sequences = False
        self._calls: list[tuple[int | None, int | None]] | None = None  # layers that called it, and their windows

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """While the block runs, every rank has whole sequences."""
        self.has_whole_sequences = True
        try:
            yield
        finally:
            self.has_whole_sequences = False

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **how: Any
    ) -> tuple[Tensor, None]:
        """Returns (B, T, heads, width). query: (B, heads, T, width), key and value with their own heads.

        Raises UserError for anything but causal attention, with or without a sliding_window.
        """
        if self._calls is not None:
            self._calls.append((getattr(module, "layer_idx", None), how.get("sliding_window")))
        asked = [name for name, value in how.items() if value is not None and value is not False]
        unknown = sorted({*asked} - KNOWN - WITHOUT_EFFECT) + ([] if attention_mask is None else ["a mask"])
        causal = how.get("is_causal")
        if unknown or not (getattr(module, "is_causal", True) if causal is None else causal):
            why = f"asks for {', '.join(unknown)}" if unknown else "is not causal"
            raise problem("engine.cp", f"the attention of {type(module).__name__} {why}", "leave cp out")
        if self.has_whole_sequences:
            return self._attended(module, query, key, value, how)
        query, key, value = (_AllToAll.apply(t, 1, 2, self._group) for t in (query, key, value))
        found = self._attended(module, query, key, value, how)
        return _AllToAll.apply(found[0], 1, 2, self._group), None

    def _attended(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: Mapping[str, Any]
    ) -> tuple[Tensor, None]:
        """Returns attention of whole sequences."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        length, window = query.shape[2], how.get("sliding_window")
        mask = None if window is None or window >= length else _band(length, window, query.device)
        return sdpa_attention_forward(module, query, key, value, mask, **how)

    @contextmanager
    def called_by(self, blocks: int, config: Any) -> Iterator[None]:
        """While the block runs, counts calls. Raises UserError unless each of so many blocks calls it, with its window.

        A layer of another kind would see a part of the sequence, and some architectures limit attention to a window by
        their mask alone, which is not made here. config: Transformers', of the model.
        """
        self._calls = []
        yield
        calls, self._calls = self._calls, None
        if len(calls) != blocks:
            why = f"of {blocks} blocks {len(calls)} call attention, and what else looks along a sequence sees a part"
            raise problem("engine.cp", why, "leave cp out")
        text = config.get_text_config()
        window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
        others = sorted({*(kinds or ())} - {"full_attention", "sliding_attention"})  # chunked, say
        if others:
            raise problem("engine.cp", f"some layers are {', '.join(others)}, and parts are not cut so", "leave cp out")
        slides = bool(window) and getattr(text, "use_sliding_window", True)
        for layer, recorded in calls:
            slides_here = slides if kinds is None or layer is None else kinds[layer] == "sliding_attention"
            if slides_here and recorded != window:
                why = f"the attention of layer {layer} does not get its window ({window})"
                raise problem("engine.cp", why, "leave cp out")


@functools.lru_cache(maxsize=2)
def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Returns (length, length): true where a position may look: at itself and the window - 1 before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def use_ulysses(model: nn.Module, group: dist.ProcessGroup, heads_share: int) -> Ulysses:
    """Replaces the model's attention. heads_share: tensor ranks that heads are divided among already."""
    from transformers import AttentionInterface

    config, ranks = getattr(model, "config", None), dist.get_world_size(group)
    if config is None or not hasattr(model, "set_attn_implementation"):
        why = f"{type(model).__name__} is no Transformers model, whose attention can be replaced"
        raise problem("engine.cp", why, "leave cp out")
    for field in HEADS:
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % (ranks * heads_share):
            times = f" * tp ({heads_share})" if heads_share > 1 else ""
            raise problem("engine.cp", f"{field} ({heads}) is no multiple of cp ({ranks}){times}", "lower a degree")
    attention, name = Ulysses(group), f"drivetrain_ulysses_{next(NUMBERS)}"
    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)  # type: ignore[operator]
    return attention


def part_of(batch: Batch, pads: Mapping[str, int | None], rank: int, ranks: int, multiple: int = 1) -> Batch:
    """Returns this rank's part of every sequence, padded to parts of one length, a multiple of `multiple`.

    pads: by tensor, the value of a padding position; None: it counts on from the one before.
    """
    found = dict(batch)
    for name, pad in pads.items():
        part = -(-batch[name].shape[1] // (ranks * multiple)) * multiple
        numbers = _padded(on_host(batch[name]), pad, rank * part, (rank + 1) * part)
        found[name] = batch[name].new_empty(numbers.shape).copy_(torch.from_numpy(numbers))
        remember(found[name], numbers)  # a plan's tensors have none themselves
    return found


def _padded(numbers: np.ndarray, pad: int | None, begin: int, end: int) -> np.ndarray:
    """Returns the columns from `begin` to `end`, those beyond the last one filled up. pad: None counts on from it."""
    columns = np.arange(begin, end)
    beyond = np.maximum(0, columns - (numbers.shape[1] - 1))
    taken = numbers[:, columns - beyond]
    return taken + beyond if pad is None else np.where(beyond > 0, pad, taken)
