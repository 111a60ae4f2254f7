"""Loads model.onnx by ONNX Runtime, on the CPU."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import torch
from torch import Tensor

from drivetrain.export.runtimes.exchange import Answered, Asked, run
from drivetrain.export.runtimes.graphs import answered


def answer(asked: Asked) -> Answered:
    session = onnxruntime.InferenceSession(Path(asked.folder) / "model.onnx", providers=["CPUExecutionProvider"])

    def graph(inputs: dict[str, Tensor]) -> Tensor:
        [scores] = session.run(None, {name: each.numpy() for name, each in inputs.items()})
        return torch.from_numpy(scores)

    return answered(graph, asked, ("onnxruntime",))


if __name__ == "__main__":
    run(answer)
