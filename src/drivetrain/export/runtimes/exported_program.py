"""Loads model.pt2 by torch.export.load, without the Python of the model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from drivetrain.export.runtimes.exchange import Answered, Asked, run
from drivetrain.export.runtimes.graphs import answered


def answer(asked: Asked) -> Answered:
    program = torch.export.load(Path(asked.folder) / "model.pt2").module()

    def graph(inputs: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            scores: Tensor = program(inputs)
        return scores

    return answered(graph, asked, ("torch",))


if __name__ == "__main__":
    run(answer)
