"""Tests what lies in CPU memory (activations, optimizer states, parameters, of adapters too) changes no curve: on every
engine that of plain PyTorch in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

import pytest
from torch import nn

from drivetrain.engines import autograd
from drivetrain.memory import offload
from tests import tiny_workload
from tests.parity.cases import Curve
from tests.parity.mesh_cases import MeshCase, check, plain, run_case
from tests.parity.spawned import curves
from tests.ranks import RankPool


@dataclass(frozen=True)
class Offloaded(MeshCase):
    @property
    def shown(self) -> str:
        return f"{super().shown}, activations in CPU memory"

    @property
    def name(self) -> str:
        return f"{super().name}-offloaded"


ENGINES = [{"name": "ddp"}, {"name": "fsdp"}, *({"name": "deepspeed", "stage": stage} for stage in (2, 3))]
CASES = [
    Offloaded({"name": "fsdp"}, model="sft-qlora", recompute=True),
    Offloaded({"name": "deepspeed", "stage": 3}, model="sft"),
    Offloaded({"pp": 2}, recompute=True),
]
REST = [
    Offloaded({"name": "fsdp"}, "bf16-mixed", model="sft"),
    *(Offloaded(engine, model="sft", recompute=kind) for engine in ENGINES for kind in (False, True)),
    *(Offloaded(engine, model="sft-lora") for engine in ENGINES),
    *(Offloaded({"name": "accelerate", "driver": driver}, model="sft") for driver in ("ddp", "fsdp")),
    *(Offloaded({"name": name}, model="sft", recompute="selective") for name in ("single", "fsdp")),
    *(Offloaded({"name": name}, model="sft", compile=True) for name in ("single", "ddp", "fsdp")),
    Offloaded({"name": "fsdp"}, model="sft", compile=True, recompute=True),
    *(Offloaded({axis: 2}, recompute=kind) for axis in ("pp", "cp", "tp", "dp") for kind in (False, True)),
    Offloaded({"tp": 2, "sequence_parallel": True}),
    Offloaded({"pp": 2, "schedule": "zero_bubble"}),
    Offloaded({"dp": 2, "shard": True}, compile=True),
]
# the engines' own: parameters and optimizer states, of adapters too
STATES = [
    MeshCase({"name": "fsdp", "offload": True}, model="sft-qlora"),
]
ALL = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
REST_OF_STATES = [
    MeshCase({"name": "deepspeed", "stage": 2, "offload_optimizer": "cpu"}, model="sft-lora", optimizer="adamw"),
    MeshCase({"name": "fsdp", "offload": True}, model="sft-lora", optimizer="adamw"),
    MeshCase({"name": "fsdp", "offload": True}, "bf16-mixed", model="sft-qlora"),
    MeshCase({"name": "deepspeed", "stage": 1, "offload_optimizer": "cpu"}, model="sft-lora"),
    MeshCase({"name": "deepspeed", "stage": 2, "offload_optimizer": "cpu"}, model="sft-qlora"),
    MeshCase({"name": "deepspeed", "stage": 3, "offload_optimizer": "cpu"}, model="sft-lora", optimizer="adamw"),
    MeshCase({"name": "deepspeed", "stage": 3, **ALL}, model="sft-lora"),
    MeshCase({"name": "deepspeed", "stage": 3, **ALL}, model="sft-qlora"),
    MeshCase({"name": "accelerate", "driver": {"name": "fsdp", "offload": True}}, model="sft-qlora"),
]


def run_offloaded(cases: Sequence[MeshCase]) -> list[Curve]:
    return [_with_activations_away(case) if isinstance(case, Offloaded) else run_case(case) for case in cases]


def _with_activations_away(case: MeshCase) -> Curve:
    """Train with activations moved, tensors this small too. AssertionError if none was moved."""
    made: list[offload.Offload] = []

    def remembered(model: nn.Module, blocks: Sequence[nn.Module], planned: bool) -> offload.Offload:
        made.append(offload.offload_activations(model, blocks, planned))
        return made[0]

    options = functools.partial(tiny_workload.EngineOptions, offload_activations=True)
    with (
        mock.patch.object(tiny_workload, "EngineOptions", options),
        mock.patch.object(offload, "LEAST_BYTES", 256),
        mock.patch.object(autograd, "offload_activations", remembered),
    ):
        curve = run_case(case)
    assert made[0].moved_bytes > 0
    return curve


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, ranks: Callable[[int], RankPool]) -> Callable[[MeshCase], Curve]:
    return curves(request, ranks, run_offloaded, lambda case: case.world, 12)


@functools.cache
def reference(precision: str, model: str, optimizer: str) -> Curve:
    return plain(MeshCase({}, precision, model=model, optimizer=optimizer))


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case.name) for case in CASES + STATES),
        *(
            pytest.param(case, id=case.name, marks=pytest.mark.slow)
            for case in REST + REST_OF_STATES
            if case not in CASES
        ),
    ],
)
def test_the_curve_is_that_of_plain_pytorch(case: MeshCase, found: Callable[[MeshCase], Curve]) -> None:
    check(case, found(case), reference(case.precision, case.model, case.optimizer))
