"""Scores of several sequences that lie end to end in one row, or of several places in them, by Transformers' sequence
and token classifiers of decoders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.models.packed_attention import PackedAttention, use_packed_attention
from drivetrain.models.read_places import read_alone

HEAD = "score"


def use_packed_scores(model: Any, choice: str, warn: Callable[[str], None]) -> PackedAttention | None:
    """Lets the classifier take `ends`, (S,) int64, places in one row whose position_ids begin again with each sequence,
    such as those of the sequences' last tokens: its logits are then those of the places, (S, labels). Without `ends` it
    is as before.

    Returns None if the model cannot, and leaves it unchanged; `warn` gets the reason. model: before any wrapping.
    """
    language = getattr(model, model.base_model_prefix, None)
    if not isinstance(language, nn.Module) or not isinstance(getattr(model, HEAD, None), nn.Module):
        warn(f"sequences cannot be packed: {type(model).__name__} has no head called {HEAD} over a language model")
        return None
    packed = use_packed_attention(language, choice, warn)
    if packed is not None:
        read = _Ends()
        read_alone(language, lambda: read.now)
        model.forward = MethodType(_scoring(type(model).forward, read), model)
    return packed


class _Ends:
    """Holds what the pass that runs now reads (`read_places`). Copies of a model share it: one of them runs at a
    time."""

    now: tuple[torch.Size, Tensor] | None = None


def _scoring(usual: Callable[..., Any], read: _Ends) -> Callable[..., Any]:
    from transformers.modeling_outputs import SequenceClassifierOutputWithPast

    @functools.wraps(usual)
    def forward(model: Any, *args: Any, ends: Tensor | None = None, **inputs: Any) -> Any:
        if ends is None:
            return usual(model, *args, **inputs)
        if "input_ids" in inputs:
            read.now = inputs["input_ids"].shape, ends
        try:
            hidden = getattr(model, model.base_model_prefix)(*args, **inputs).last_hidden_state
        finally:
            read.now = None
        found = hidden[0].index_select(0, ends)
        found = model.dropout(found) if hasattr(model, "dropout") else found  # of a token classifier
        return SequenceClassifierOutputWithPast(logits=getattr(model, HEAD)(found))

    return forward
