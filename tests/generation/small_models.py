"""Random models of the kinds that generation is tested with, whose likeliest tokens differ clearly."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from drivetrain.generation.cache import windows_of
from drivetrain.generation.constraints import Constraints
from drivetrain.generation.local import LocalGenerator
from drivetrain.generation.local_forward import LocalForward, stores_of
from drivetrain.generation.row_stores import CachedRows
from drivetrain.generation.running_batch import RunningBatch

SIZE, PLACES = 300, 96
_SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
_SIZES = {**_SHAPE, "num_key_value_heads": 2, "vocab_size": SIZE, "max_position_embeddings": PLACES}
KINDS: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "qwen2": _SIZES,
    "qwen3": {**_SIZES, "head_dim": 16},  # norms of queries and keys; heads wider together than the model
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": SIZE, "n_positions": PLACES},
    "mistral": {**_SIZES, "sliding_window": 8},  # each layer
    "gemma2": {**_SIZES, "head_dim": 8, "sliding_window": 8},  # every second layer; capped logits
    "gemma3_text": {**_SIZES, "head_dim": 8, "sliding_window": 8},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": SIZE},  # distances instead of positions
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": SIZE, "alibi": True},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": SIZE},  # a state instead of keys and values
}
UNCACHED = ("mamba",)


def model_of(kind: str, seed: int = 0) -> Any:
    """Returns a model whose answers never end by themselves."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **KINDS[kind], bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config).eval()
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D):
            nn.init.normal_(module.weight, std=0.5)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model


def prompts(count: int, longest: int = 40, seed: int = 1) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [tuple(torch.randint(0, SIZE, (length,), generator=generator).tolist()) for length in lengths]


class Letters:
    """Decodes each token as a letter and a space."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return "".join(f"{chr(97 + number % 26)} " for number in ids)


def generator_of(
    model: Any,
    rows: int = 4,
    cells: int = 10**6,
    vocabulary: Any = None,
    ends: frozenset[int] = frozenset(),
    recorded: Any = None,
) -> LocalGenerator:
    """Answers with a model, at most so many rows at once. recorded: RecordedSteps, which a CPU has none of."""
    forward = LocalForward(model)
    stores, texts = stores_of(forward, model), vocabulary or Letters()
    if recorded is not None:
        windows = windows_of(model.config)
        assert windows is not None
        stores = functools.partial(CachedRows, model=model, windows=windows, recorded=recorded)
    constraints = Constraints(texts, ends, SIZE)
    return LocalGenerator(lambda _: RunningBatch(stores(forward), rows, cells), texts, ends, PLACES, SIZE, constraints)
