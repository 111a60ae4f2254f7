"""Writes a language model's ONNX graph with its cache: each pass takes the keys and values of the tokens before it, and
returns those with its own.

Inputs and outputs have the names that Optimum gave such graphs, by which other programs know them: input_ids and
position_ids (batch, new), attention_mask (batch, past + new), past_key_values.N.key and .value (batch, heads, past,
width) of each layer, with past = 0 at the beginning; logits (batch, new, vocabulary), and present.N.key and .value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.generation.cache import new_cache, windows_of

NEW, PAST = 3, 5  # tokens that the graph is traced with: other numbers than each other, and than 1
ONNX_SCRIPT = """import json
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
names = [each.name for each in session.get_outputs()][1:]
caches = [each for each in session.get_inputs() if each.name.startswith("past_key_values.")]
tokens = json.load(open("example.json"))["input_ids"][0][0]
past = {each.name: np.zeros((1, each.shape[1], 0, each.shape[3]), "float32") for each in caches}
given, new = tokens, []
while len(new) < 8:  # the likeliest tokens; each pass takes what the last one has not seen
    length = len(tokens) + len(new)
    inputs = {
        "input_ids": np.array([given]),
        "position_ids": np.arange(length - len(given), length)[None],
        "attention_mask": np.ones((1, length), "int64"),
    }
    logits, *present = session.run(None, {**inputs, **past})
    past = {name.replace("present", "past_key_values"): each for name, each in zip(names, present)}
    given = [int(logits[0, -1].argmax())]
    new += given
print(new)
"""


class Step(nn.Module):
    """A pass over new tokens behind those whose keys and values are given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, ...]:
        cache = new_cache(past)
        given: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        logits = self.model(**given, past_key_values=cache, use_cache=True).logits
        return (logits, *(each for layer in cache.layers for each in (layer.keys, layer.values)))


def has_cache(model: Any) -> bool:
    """Returns whether the model keeps keys and values of each layer, and nothing else, between passes."""
    return windows_of(model.config) is not None


def write(model: Any, into: Path) -> None:
    """Writes the graph. Raises what PyTorch raises where it cannot trace the model."""
    ids = torch.arange(2 * (PAST + NEW)).view(2, -1) % int(model.config.get_text_config().vocab_size)
    with torch.no_grad():
        filled = model(input_ids=ids[:, :PAST], past_key_values=new_cache(()), use_cache=True).past_key_values
    past = [(layer.keys, layer.values) for layer in filled.layers]
    positions = torch.arange(PAST, PAST + NEW).expand(2, -1).contiguous()
    either = torch.export.Dim.DYNAMIC
    of_tokens = {0: either, 1: either}
    layers = [f"{number}.{kind}" for number in range(len(past)) for kind in ("key", "value")]
    made = torch.onnx.export(
        Step(model).eval(),
        (ids[:, PAST:].contiguous(), torch.ones_like(ids), positions, past),
        dynamo=True,
        dynamic_shapes=(of_tokens, of_tokens, of_tokens, [({0: either, 2: either},) * 2 for _ in past]),
        input_names=["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{each}" for each in layers)],
        output_names=["logits", *(f"present.{each}" for each in layers)],
        verbose=False,
    )
    assert made is not None
    made.save(str(into))
