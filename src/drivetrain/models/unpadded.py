"""Lays the texts of a batch end to end in one row, for encoders with a classification head: no padding is computed.

Like packed sequences of language models (`packed_attention`), but attention looks both ways, and the head needs one
place of each text, the first. That place is picked inside the model by a forward hook: where the last layer's attention
ends if the model allows it, so that the last layer's feed-forward block computes first places alone, else where the
stack of layers ends. Later modules see texts of one place each, (S, 1, width), and take the first as usual.

Whether a model can do that is found out by a twin of two layers with random weights, the same on every rank: its loss
and every gradient must be those of a padded batch. Dropout draws other masks of the same rate than in a padded batch.

The idea of computing no padding in BERT: Zeng et al. 2022, "Boosting Distributed Training Performance of the Unpadded
BERT Model".
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.models.language_options import evaluating
from drivetrain.models.packed_attention import NAME, PackedAttention, are_bounds, bounds_of_lengths, register
from drivetrain.models.packing_trial import why_not_tried

Warn = Callable[[str], None]
LOG = logging.getLogger(__name__)
TRIED = (3, 6, 4)  # tokens of the twin's texts
TOLERANCE = 1e-4  # of the largest value: rounding in fp32 is some 1e-6
KNOWN = 64  # tokens of the twin's vocabulary, or as many as its padding token asks for


@dataclass(frozen=True)
class Places:
    """The way a model counts a text's positions: from `first`; `skipped`: the token that does not count (RoBERTa's
    padding), which has the position `first - 1`."""

    first: int = 0
    skipped: int | None = None

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Returns the positions of a text's tokens, (T,) int64."""
        if self.skipped is None:
            return np.arange(self.first, self.first + len(ids))
        counts = ids != self.skipped
        return np.where(counts, np.cumsum(counts), 0) + self.first - 1


def use_unpadded(model: nn.Module, trusted: bool, warn: Warn = LOG.warning) -> Places | None:
    """Lets the model take a row of several texts; returns how their positions are counted.

    Returns None if the model cannot, and leaves it unchanged; `warn` gets the reason. trusted: whether the model is
    code that lies beside its weights. Inputs of such a row: `row_inputs`.
    """
    reason, found = _why_not_known(model, trusted), None
    if reason is None:
        found = _way_of(model)
        reason = None if found is not None else f"{type(model).__name__} gives another loss or other gradients then"
    if found is None:
        warn(f"texts are padded, not laid end to end: {reason}")
        return None
    found.apply(model)
    return found.places


def row_inputs(ids: Tensor, positions: Tensor, lengths: Tensor, segments: Tensor | None) -> dict[str, Tensor]:
    """Returns keyword arguments for the model. ids, positions, segments: (1, T). lengths: (S,) of the texts, in
    order."""
    inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": bounds_of_lengths(lengths)}
    return inputs if segments is None else {**inputs, "token_type_ids": segments}


def _why_not_known(model: nn.Module, trusted: bool) -> str | None:
    if trusted:
        return "a model's own code may look at the batch in ways of its own"
    reason = why_not_tried(model, "auto")
    if reason is not None:
        return reason
    config: Any = model.config
    if getattr(config, "sliding_window", None) or getattr(config, "local_attention", None):
        return f"{type(model).__name__} attends to a window"
    if _stack_of(model) is None:
        return f"{type(model).__name__} has no stack of layers to pick first places after"
    return None


# --- ways to do it, and the trial -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Way:
    early: bool  # whether first places are picked before the last layer's feed-forward block
    places: Places

    def apply(self, model: nn.Module) -> None:
        register(PackedAttention("auto"))
        model.set_attn_implementation(NAME)  # type: ignore[operator]
        stack, layers = _found(_stack_of(model))
        picked = layers[-1].attention if self.early else stack
        picked.register_forward_hook(torch.compiler.disable(_pick), with_kwargs=True)


def _way_of(model: nn.Module) -> _Way | None:
    """Returns the cheapest way in which a twin computes the same; None if there is none."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twin = _twin(model)
        wanted = _tried(twin, None)
        for way in _ways(model):
            other = copy.deepcopy(twin)
            try:
                way.apply(other)
                found = _tried(other, way.places)
            except Exception as error:  # whatever an architecture cannot do with such a row
                LOG.debug("unpadded rows: %s", error)
                continue
            if _same(wanted, found):
                return way
    return None


def _ways(model: nn.Module) -> Iterator[_Way]:
    _, layers = _found(_stack_of(model))
    table = position_table(model)
    padding = None if table is None else table.padding_idx
    places = Places() if padding is None else Places(padding + 1, padding)
    if isinstance(getattr(layers[-1], "attention", None), nn.Module):
        yield _Way(True, places)
    yield _Way(False, places)


def _twin(model: nn.Module) -> nn.Module:
    """Returns a small model of the same class and config, in fp32."""
    config: Any = copy.deepcopy(model.config)
    config.num_hidden_layers = 2
    config.vocab_size = min(config.vocab_size, max(KNOWN, (getattr(config, "pad_token_id", None) or 0) + 1))
    config._attn_implementation = "sdpa"
    return type(model)(config).float()


def _tried(twin: nn.Module, places: Places | None) -> list[Tensor]:
    """Returns logits and gradients for TRIED texts: padded, or in one row with positions counted in this way."""
    generator, config = torch.Generator().manual_seed(0), cast(Any, twin.config)
    padding: Any = getattr(config, "pad_token_id", None) or 0
    drawn = [torch.randint(0, config.vocab_size - 1, (n,), generator=generator) for n in TRIED]
    texts = [each + (each >= padding) for each in drawn]  # any token but padding, which may be the last
    if places is None:
        inputs = {
            "input_ids": nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=padding),
            "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(t) for t in texts], batch_first=True),
        }
    else:
        positions = torch.from_numpy(np.concatenate([places.of(text.numpy()) for text in texts]))
        inputs = row_inputs(torch.cat(texts)[None], positions[None], torch.tensor(TRIED), None)
    with evaluating(twin), torch.enable_grad():
        logits: Tensor = twin(**inputs).logits
        labels = torch.arange(len(TRIED)) % logits.shape[-1]
        weights = torch.arange(1.0, len(TRIED) + 1)
        (nn.functional.cross_entropy(logits, labels, reduction="none") * weights).sum().backward()
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in twin.parameters()]
    return [logits.detach(), *gradients]


def _same(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    largest = max(float(each.abs().max()) for each in wanted[1:])
    bounds = [float(wanted[0].abs().max()), *[largest] * (len(wanted) - 1)]
    return all(
        own.shape == other.shape and torch.allclose(own, other, rtol=0, atol=TOLERANCE * bound)
        for own, other, bound in zip(wanted, found, bounds, strict=True)
    )


# --- inside the model -------------------------------------------------------------------------------------------------


def position_table(model: nn.Module) -> nn.Embedding | None:
    """Returns the embedding of positions; None where a model has no such table."""
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    return next((table for table in tables if isinstance(table, nn.Embedding)), None)


def text_positions(model: Any) -> int | None:
    """Returns the positions a text may take; RoBERTa and its like keep their first for padding. None: no bound is
    known."""
    table = position_table(model)
    if table is not None:
        return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
    return getattr(model.config, "max_position_embeddings", None)


def _stack_of(model: nn.Module) -> tuple[nn.Module, nn.ModuleList] | None:
    """Returns the module that runs all layers, and the layers. Not the model itself, whose output is the logits."""
    number = getattr(model.config, "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == number and "." in name:
            return model.get_submodule(name.rpartition(".")[0]), module
    return None


def _found(stack: tuple[nn.Module, nn.ModuleList] | None) -> tuple[nn.Module, Any]:
    assert stack is not None, "a model without a stack was refused before"
    return stack


def _pick(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> Any:
    """Picks the first places of a row's texts, in place of all: (1, T, width) → (S, 1, width). Other batches are
    unchanged."""
    del module
    bounds = next((each for each in (*args, *kwargs.values()) if are_bounds(each)), None)
    if bounds is None:
        return output
    first = bounds[0, 0, 0, :-1].long()
    if isinstance(output, tuple):
        return output[0][0, first][:, None], *output[1:]
    if isinstance(output, Tensor):
        return output[0, first][:, None]
    output["last_hidden_state"] = output["last_hidden_state"][0, first][:, None]
    return output
