"""Promise 1 on a mesh: no product of pipeline, data, context and tensor degrees changes the curve.

Losses, gradient norms and every single gradient against plain PyTorch in one process, twelve steps with clipping
active and ragged windows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.parity.cases import Curve
from tests.parity.mesh_cases import MeshCase, check, plain, run_cases
from tests.parity.spawned import curves
from tests.ranks import RankPool

AT_ONCE = 6
AXES = [{"tp": 2}, {"cp": 2}, {"pp": 2}, {"dp": 2}, {"dp": 2, "shard": True}]


def every_case() -> list[MeshCase]:
    """Each axis alone at 2 and 4, each pair at 2 x 2, three at 2 x 2 x 2; options; precisions."""
    alone = [*AXES, {"tp": 4}, {"cp": 4}, {"pp": 4}, {"dp": 4}, {"dp": 4, "shard": True}]
    pairs = [
        {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "dp": 2, "shard": True}, {"pp": 2, "cp": 2},
        {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "shard": True}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2},
    ]  # fmt: skip
    triples = [
        {"pp": 2, "dp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2, "shard": True}, {"pp": 2, "cp": 2, "tp": 2},
        {"dp": 2, "cp": 2, "tp": 2, "shard": True},
    ]  # fmt: skip
    cases = [MeshCase(degrees, precision) for degrees in alone + pairs for precision in ("fp32", "bf16-mixed")]
    cases += [MeshCase(degrees, precision) for degrees in triples for precision in ("fp32", "bf16-mixed")]
    cases += [MeshCase(degrees, accumulation=1) for degrees in alone + pairs]
    options: list[dict[str, Any]] = [
        {"pp": 2, "schedule": "gpipe"}, {"pp": 2, "schedule": "zero_bubble"}, {"pp": 4, "schedule": "zero_bubble"},
        {"tp": 2, "sequence_parallel": True}, {"tp": 2, "loss_parallel": True},
        {"tp": 2, "sequence_parallel": True, "loss_parallel": True},
        {"pp": 2, "tp": 2, "sequence_parallel": True, "loss_parallel": True},
    ]  # fmt: skip
    both = {"sequence_parallel": True, "loss_parallel": True}
    on_four: list[dict[str, Any]] = [
        {"pp": 2, "dp": 2, "schedule": "zero_bubble"}, {"pp": 2, "dp": 2, "shard": True, "schedule": "zero_bubble"},
        {"pp": 2, "cp": 2, "schedule": "zero_bubble"}, {"pp": 2, "dp": 2, "shard": True, "schedule": "gpipe"},
        {"pp": 2, "tp": 2, "schedule": "zero_bubble", "sequence_parallel": True},
        {"dp": 2, "tp": 2, "shard": True, **both}, {"cp": 2, "tp": 2, **both},
    ]  # fmt: skip
    cases += [MeshCase(degrees) for degrees in options + on_four]
    cases += [MeshCase({"dp": 2, "tp": 2, "shard": True}, model=model) for model in ("qwen3", "tied")]
    cases += [MeshCase({"pp": 2, "dp": 2, "shard": True}, model=model) for model in ("frozen", "tied")]
    over_stages: list[dict[str, Any]] = [
        {"pp": 2}, {"pp": 4}, {"pp": 2, "schedule": "zero_bubble"}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2},
        {"pp": 2, "cp": 2}, {"pp": 2, "dp": 2, "tp": 2},
    ]  # fmt: skip
    cases += [MeshCase(degrees, model="tied") for degrees in over_stages]
    cases += [MeshCase({"pp": 2}, precision, model="tied", optimizer="adamw") for precision in ("fp32", "bf16-mixed")]
    cases += [MeshCase(degrees, optimizer="adamw") for degrees in AXES]
    cases += [MeshCase(degrees, model="columns") for degrees in ({"tp": 2}, {"pp": 2}, {"dp": 2}, {"pp": 2, "tp": 2})]
    cases += [MeshCase({"tp": 2}, model=model) for model in ("grouped", "tied", "qwen3", "phi", "learned")]
    cases += [MeshCase({"tp": 2, "sequence_parallel": True}, model=model) for model in ("tied", "qwen3")]
    cases += [MeshCase(degrees, model="frozen") for degrees in ({"pp": 2}, {"pp": 2, "schedule": "zero_bubble"})]
    cases += [MeshCase({"cp": 2}, model="windowed")]
    cases += [MeshCase(degrees, model=model) for degrees in ({"tp": 2}, {"pp": 2}) for model in ("bert", "vit")]
    cases += [MeshCase({"pp": 2, "tp": 2}, model="bert"), MeshCase({"pp": 2, "tp": 2}, model="vit")]
    cases += [MeshCase(degrees, recompute=kind) for degrees in AXES for kind in (True, "selective")]
    cases += [MeshCase(degrees, compile=True) for degrees in AXES]
    cases += [MeshCase({"pp": 2, "schedule": "zero_bubble"}, recompute=True)]
    return cases


def in_the_subset(case: MeshCase) -> bool:
    """Two ranks, a precision; of tensor-parallel ones, which take longest, a few."""
    if case.world != 2 or case.accumulation != 3 or case.compile:
        return False
    if "tp" in case.degrees:
        options = set(case.degrees) - {"tp"}
        plain = not case.recompute and case.optimizer == "sgd" and case.model in ("llama", "bert", "columns")
        return plain and (case.precision == "fp32" or not options) and len(options) != 1
    if case.recompute:
        return case.degrees in ([{"pp": 2}, {"cp": 2}] if case.recompute is True else [{"dp": 2, "shard": True}])
    return case.optimizer == "sgd" and case.precision == "fp32"


CASES = [
    pytest.param(case, id=case.name, marks=[] if in_the_subset(case) else [pytest.mark.slow]) for case in every_case()
]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, ranks: Callable[[int], RankPool]) -> Callable[[MeshCase], Curve]:
    return curves(request, ranks, run_cases, lambda case: case.world, AT_ONCE)


@functools.cache
def reference(precision: str, optimizer: str, model: str) -> Curve:
    return plain(MeshCase({}, precision, optimizer=optimizer, model=model))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_curve_on_a_mesh_is_that_of_plain_pytorch(case: MeshCase, found: Callable[[MeshCase], Curve]) -> None:
    check(case, found(case), reference(case.precision, case.optimizer, case.model))
