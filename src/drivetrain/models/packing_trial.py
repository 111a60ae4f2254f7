"""Finds out whether a model can take packed sequences, from its class and config, and from running two sequences."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.models.language_options import evaluating

ATTENDING = {"full_attention", "sliding_attention"}  # kinds of layers, as Transformers' configs name them
Windows = dict[int | None, int | None]


def why_not_tried(model: nn.Module, choice: str) -> str | None:
    """Returns the reasons against it that are known without running the model."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if choice == "eager":
        return "attention=eager computes all pairs of a row"
    if config is None or not hasattr(model, "set_attn_implementation"):
        return f"{name} is no Transformers model, whose attention can be replaced"
    if not {"attention_mask", "position_ids"} <= inspect.signature(model.forward).parameters.keys():
        return f"{name} takes no positions, but counts them through the row"
    if not model._can_set_attn_implementation():  # type: ignore[operator]
        return f"{name} has an attention of its own, which cannot be replaced"
    other = set(getattr(config.get_text_config(), "layer_types", None) or ()) - ATTENDING
    return f"{name} has layers of other kinds than attention: {', '.join(sorted(other))}" if other else None


def why_not(
    model: nn.Module, windows: Windows, alone: Tensor | Exception | None, found: Tensor | Exception | None
) -> str | None:
    """Returns the reason against it that running shows.

    windows: of each layer that has run. alone: logits of sequences each in a row of its own, by the unchanged model.
    found: its logits for them now. An exception in place of logits is the reason that there are none.
    """
    name = type(model).__name__
    error = next((each for each in (found, alone) if isinstance(each, Exception)), None)
    if error is not None:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        return f"{name} cannot run them: {reason}"
    if not (isinstance(alone, Tensor) and isinstance(found, Tensor)):
        return None  # the rank that has the weights looks
    if not torch.allclose(found, alone, rtol=0, atol=1e-3 * float(alone.abs().max())):
        return f"{name} mixes the sequences of a row elsewhere than in its attention"
    missed = _window_missed(model, windows)
    return f"{name} does not pass the sliding window to its attention" if missed else None


@torch.no_grad()
def tried(model: nn.Module, together: bool) -> Tensor | Exception | None:
    """Returns logits of two sequences in one row, or each in its own: (7, vocabulary); of a model without a head its
    hidden states. None for a model without weights."""
    device = next(model.parameters()).device
    if device.type == "meta":
        return None
    known = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    tokens = torch.randint(known, (7,), generator=torch.Generator().manual_seed(0)).to(device)
    parts = tokens.split([3, 4])
    positions = [torch.arange(len(part), device=device) for part in parts]
    try:
        with evaluating(model):
            if together:
                return _logits(model, tokens, torch.cat(positions))
            return torch.cat([_logits(model, *each) for each in zip(parts, positions, strict=True)])
    except Exception as error:  # whatever an architecture cannot do with such a mask
        return error


def _window_missed(model: nn.Module, windows: Windows) -> bool:
    """Returns whether a window was missed: some architectures limit attention to a window by their mask alone, which
    boundaries replace."""
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        sliding = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
        return any(windows.get(layer) != config.sliding_window for layer in sliding)
    limited = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return bool(limited) and set(windows.values()) != {config.sliding_window}


def _logits(model: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    given = model(input_ids=tokens[None], position_ids=positions[None], **extra)
    logits: Tensor | None = getattr(given, "logits", None)  # a model without a head has none
    return (given.last_hidden_state if logits is None else logits)[0].float()
