"""Promise 1 for adapters: on every engine the curve of plain PEFT on plain PyTorch in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.parity.cases import Curve
from tests.parity.mesh_cases import MeshCase, check, plain, run_cases
from tests.parity.spawned import curves
from tests.ranks import RankPool

METHODS = ("lora", "dora", "pissa", "oft", "ia3", "prefix", "ptuning")
ENGINES = [
    {"name": "ddp"},
    {"name": "fsdp"},
    *({"name": "deepspeed", "stage": stage} for stage in (2, 3)),
]
PARTS = {"sequence_parallel": True, "loss_parallel": True}
CASES = [
    *(MeshCase({"name": "single"}, model=f"sft-{method}") for method in (*METHODS, "qlora", "qoft", "int8lora")),
    *(MeshCase(engine, model="sft-lora") for engine in (ENGINES[0], ENGINES[-1])),
    MeshCase({"name": "fsdp"}, model="sft-qlora"),
    MeshCase({"tp": 2}, model="sft-lora"),
    MeshCase({"pp": 2}, model="sft-lora"),
]
REST = [
    *(MeshCase(engine, model="sft-lora") for engine in ENGINES[1:3]),
    MeshCase({"name": "deepspeed", "stage": 3}, model="sft-qlora"),
    MeshCase({"name": "fsdp"}, "bf16-mixed", model="sft-qlora"),
    MeshCase({"tp": 2}, model="sft-wide-qlora"),
    MeshCase({"name": "fsdp"}, model="sft-pissa"),
    MeshCase({"tp": 2}, model="sft-ia3"),
    *(MeshCase(engine, model="sft-qlora") for engine in (ENGINES[0], ENGINES[2])),
    *(MeshCase(engine, model="sft-int8lora") for engine in ENGINES[:2]),
    *(MeshCase(engine, model="sft-dora") for engine in ENGINES[1:]),
    MeshCase({"name": "fsdp"}, model="sft-ia3"),
    *(MeshCase(engine, model="sft-oft") for engine in ENGINES),
    MeshCase({"name": "fsdp"}, model="sft-qoft"),
    MeshCase({"pp": 2}, model="sft-oft"),
    MeshCase({"cp": 2}, model="sft-padded-oft"),
    MeshCase({"name": "fsdp"}, "bf16-mixed", model="sft-oft"),
    MeshCase({"name": "ddp"}, model="sft-prefix"),
    MeshCase({"name": "fsdp"}, model="sft-ptuning"),
    MeshCase({"name": "deepspeed", "stage": 1}, model="sft-lora"),
    MeshCase({"name": "ddp"}, "bf16-mixed", model="sft-lora"),
    MeshCase({"name": "fsdp"}, "bf16-mixed", model="sft-lora"),
    MeshCase({"name": "fsdp"}, model="sft-lora", optimizer="adamw", recompute=True),
    MeshCase({"name": "accelerate", "driver": "fsdp"}, model="sft-lora"),
    *(MeshCase({"tp": 2}, model=f"sft-{method}") for method in ("pissa", "int8lora")),
    *(MeshCase({"tp": 2, **PARTS}, model=model) for model in ("sft-padded-lora", "sft-padded-ia3")),
    MeshCase({"tp": 2, **PARTS}, model="sft-padded-wide-qlora"),
    MeshCase({"tp": 2}, "bf16-mixed", model="sft-wide-qlora"),
    MeshCase({"tp": 2}, model="sft-lora", optimizer="adamw", recompute=True),
    MeshCase({"pp": 2}, model="sft-wide-qlora"),
    MeshCase({"pp": 2, "schedule": "zero_bubble"}, model="sft-wide-qlora"),
    MeshCase({"pp": 2}, model="sft-dora"),
    MeshCase({"cp": 2}, model="sft-padded-lora"),
    MeshCase({"dp": 2, "shard": True}, model="sft-wide-qlora"),
    *(MeshCase({"dp": 2, "tp": 2, **shard}, model="sft-wide-qlora") for shard in ({}, {"shard": True})),
    MeshCase({"pp": 2, "tp": 2}, model="sft-lora"),
]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, ranks: Callable[[int], RankPool]) -> Callable[[MeshCase], Curve]:
    return curves(request, ranks, run_cases, lambda case: case.world, 12)


@functools.cache
def reference(precision: str, model: str, optimizer: str) -> Curve:
    return plain(MeshCase({}, precision, model=model, optimizer=optimizer))


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case.name) for case in CASES),
        *(pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in REST),
    ],
)
def test_an_adapter_has_the_curve_of_plain_peft(case: MeshCase, found: Callable[[MeshCase], Curve]) -> None:
    check(case, found(case), reference(case.precision, case.model, case.optimizer))
