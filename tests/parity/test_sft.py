"""Promise 1 for supervised fine-tuning: packed rows of ragged conversations, on every engine, against plain PyTorch
with each conversation a padded row of one batch in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.parity.cases import Curve
from tests.parity.mesh_cases import MeshCase, check, plain, run_cases
from tests.parity.spawned import curves
from tests.ranks import RankPool

ENGINES = [
    {"name": "ddp"},
    {"name": "fsdp"},
    *({"name": "deepspeed", "stage": stage} for stage in (1, 2, 3)),
    *({"name": "accelerate", "driver": driver} for driver in ("ddp", "fsdp")),
]
AXES = [{"tp": 2}, {"pp": 2}, {"dp": 2}, {"dp": 2, "shard": True}]
CASES = [
    MeshCase({"name": "single"}, model="sft"),
    MeshCase({"name": "single"}, model="sft-fused", accumulation=1),
    *(MeshCase(engine, model="sft") for engine in (*ENGINES, *AXES)),
    MeshCase({"name": "ddp"}, "bf16-mixed", model="sft"),
    MeshCase({"name": "fsdp"}, model="sft-fused"),
    MeshCase({"name": "deepspeed", "stage": 3}, model="sft-fused"),
    MeshCase({"pp": 2}, model="sft-fused"),
    MeshCase({"name": "fsdp"}, model="sft", recompute=True),
    MeshCase({"pp": 2}, model="sft-padded"),
    MeshCase({"cp": 2}, model="sft-padded"),
    MeshCase({"tp": 2, "sequence_parallel": True, "loss_parallel": True}, model="sft-padded"),
]
SLOW = [
    MeshCase({"name": "accelerate", "driver": "fsdp"}, model="sft"),
    MeshCase({"name": "deepspeed", "stage": 2}, model="sft"),
    MeshCase({"dp": 2}, model="sft"),
    MeshCase({"name": "deepspeed", "stage": 3}, model="sft-fused"),
    MeshCase({"pp": 2}, model="sft-fused"),
    MeshCase({"name": "deepspeed", "stage": 1}, model="sft"),
    MeshCase({"name": "accelerate", "driver": "ddp"}, model="sft"),
    MeshCase({"name": "fsdp"}, model="sft", recompute=True),
    MeshCase({"tp": 2}, model="sft"),
    MeshCase({"cp": 2}, model="sft-padded"),
    MeshCase({"pp": 2, "dp": 2, "tp": 2}, model="sft"),
    MeshCase({"pp": 2, "dp": 2, "tp": 2, "shard": True}, model="sft"),
    MeshCase({"pp": 2, "dp": 2}, model="sft"),
    MeshCase({"tp": 4}, model="sft"),
]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, ranks: Callable[[int], RankPool]) -> Callable[[MeshCase], Curve]:
    return curves(request, ranks, run_cases, lambda case: case.world, 12)


@functools.cache
def reference(precision: str) -> Curve:
    return plain(MeshCase({}, precision, model="sft"))


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case.name) for case in CASES if case not in SLOW),
        *(pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_fine_tuning_on_packed_conversations_has_the_curve_of_plain_pytorch(
    case: MeshCase, found: Callable[[MeshCase], Curve]
) -> None:
    check(case, found(case), reference(case.precision))
