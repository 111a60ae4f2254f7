"""Loads model.onnx by ONNX Runtime, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from drivetrain.export.runtimes.exchange import Answered, Asked, run
from drivetrain.export.runtimes.graphs import answered

STEPS = 3  # last tokens of a sequence that a graph with a cache takes one by one


def answer(asked: Asked) -> Answered:
    session = onnxruntime.InferenceSession(Path(asked.folder) / "model.onnx", providers=["CPUExecutionProvider"])
    caches = [each for each in session.get_inputs() if each.name.startswith("past_key_values.")]

    def graph(inputs: dict[str, Tensor]) -> Tensor:
        if caches:
            return torch.from_numpy(_in_steps(session, caches, inputs["input_ids"].numpy()))
        [scores] = session.run(None, {name: each.numpy() for name, each in inputs.items()})
        return torch.from_numpy(scores)

    return answered(graph, asked, ("onnxruntime",))


def _in_steps(session: Any, caches: list[Any], ids: np.ndarray) -> np.ndarray:
    """Returns the logits of each token, (batch, length, vocabulary): of all but the last ones in one pass, and of those
    by passes of one token each over the keys and values that the pass before gave."""
    batch, length = ids.shape
    names = [each.name.replace("present", "past_key_values") for each in session.get_outputs()[1:]]
    past = {each.name: np.zeros((batch, each.shape[1], 0, each.shape[3]), np.float32) for each in caches}
    first = max(1, length - STEPS)
    found = []
    for start, end in [(0, first), *((place, place + 1) for place in range(first, length))]:
        given = {
            "input_ids": ids[:, start:end],
            "position_ids": np.arange(start, end)[None].repeat(batch, 0),
            "attention_mask": np.ones((batch, end), np.int64),
        }
        logits, *present = session.run(None, {**given, **past})
        past = dict(zip(names, present, strict=True))
        found.append(logits)
    return np.concatenate(found, axis=1)


if __name__ == "__main__":
    run(answer)
