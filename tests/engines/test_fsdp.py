"""Tests which modules FSDP gathers apart, what it shards, and what it reports when it did not engage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from drivetrain.config.engines import FsdpEngine
from drivetrain.config.precision import PRECISIONS
from drivetrain.engines import fsdp
from drivetrain.engines.fsdp import CodesMayBeSharded, give_memory, shard, wrap_fsdp
from drivetrain.errors import RunError, UserError
from drivetrain.launch.group import group_of_one


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


def check(model: nn.Module, held: int = 0) -> None:
    """The engine's own check of a model of 8 numbers; held: what the ranks hold beyond what this one does."""
    ranks = SimpleNamespace(world=1, sum=lambda number: number.add_(held))
    engine = object.__new__(fsdp.FsdpEngine)
    parts = {"_model": model, "_forward": model, "_ranks": ranks, "_config": FsdpEngine()}
    vars(engine).update(parts, _device=torch.device("cpu"), _options=SimpleNamespace(traced=False))
    engine._check_engaged()


def test_shards_that_are_not_the_whole_model_did_not_engage() -> None:
    with pytest.raises(RunError, match="engine=fsdp was asked for, but not sharded: weight, bias"):
        check(nn.Linear(3, 2))
    with group_of_one(True):
        check(cast(Any, fully_shard(nn.Linear(3, 2))))
        with pytest.raises(RunError, match="the ranks hold 9 parameters together, not 8"):
            check(cast(Any, fully_shard(nn.Linear(3, 2))), held=1)


class Coded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(6, dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.codes.float() * self.scale).sum()


def test_codes_are_sharded_beside_what_is_trained() -> None:
    """torch 2.11's own fully_shard fails here."""
    with group_of_one(True):
        model = Coded()
        shard(model, {"mesh": init_device_mesh("cpu", (1,))})
        model(torch.ones(6)).backward()
        assert isinstance(model.codes, DTensor)
        assert (model.codes.dtype, model.codes.requires_grad) == (torch.uint8, False)
        torch.testing.assert_close(cast(DTensor, model.scale.grad).to_local(), torch.arange(6.0))


def test_copies_in_16_bits_of_codes_are_refused_where_torch_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    [casts, *_] = [precision for precision in PRECISIONS.values() if precision.cast]
    monkeypatch.setattr(fsdp, "TORCH", (2, 11))
    with pytest.raises(UserError, match=r"codes of the quantised base into 16-bit floats\n.*bf16-mixed, or install"):
        wrap_fsdp(Coded(), cast(Any, None), FsdpEngine(), casts)
    fsdp.refuse_cast_codes(Coded(), PRECISIONS["bf16-mixed"])
    fsdp.refuse_cast_codes(Tied(), casts)
    monkeypatch.setattr(fsdp, "TORCH", (2, 13))
    fsdp.refuse_cast_codes(Coded(), casts)


def test_parameters_of_whole_numbers_are_made_as_torch_2_11_makes_those_of_shards() -> None:
    """With requires_grad=True at first, and the original's after."""
    with group_of_one(True):
        mesh = init_device_mesh("cpu", (1,))
        codes, scale = (DTensor.from_local(part, mesh) for part in (torch.arange(6), torch.ones(6)))
        with pytest.raises(RuntimeError, match="floating point dtype"):
            nn.Parameter(codes)
        with CodesMayBeSharded():
            assert not nn.Parameter(codes).requires_grad_(False).requires_grad
            assert nn.Parameter(scale).requires_grad
            assert not nn.Parameter(scale).requires_grad_(False).requires_grad
