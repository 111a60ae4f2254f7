"""Which modules FSDP gathers apart."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from drivetrain.config.engine import FsdpEngine
from drivetrain.config.precision import PRECISIONS
from drivetrain.engines.fsdp import give_memory, wrap_fsdp
from drivetrain.errors import UserError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(ids)))


@pytest.mark.parametrize("wrap", [["Linear"], ["Embedding"], ["Linear", "Embedding"]])
def test_a_weight_that_would_be_gathered_with_two_modules_is_refused(wrap: list[str]) -> None:
    with pytest.raises(UserError, match=r"embedding.weight and head.weight are one weight"):
        wrap_fsdp(Tied(), cast(Any, None), FsdpEngine(wrap=wrap), PRECISIONS["fp32"])


def test_buffers_lie_on_the_device_where_parameters_are_offloaded() -> None:
    """As on the rank that built the model: FSDP moves its buffers there. The meta device plays the GPU."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    give_memory(model, torch.device("cpu"), torch.device("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
