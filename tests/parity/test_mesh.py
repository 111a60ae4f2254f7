"""Promise 1 on a mesh: no product of pipeline, data, context and tensor degrees changes the curve.

Losses, gradient norms and every single gradient against plain PyTorch in one process, twelve steps with clipping
active and ragged windows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.parity.cases import Curve, largest
from tests.parity.mesh_cases import MeshCase, plain, run_cases
from tests.parity.table import Row, add_row
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
    cases += [MeshCase(degrees) for degrees in options]
    cases += [MeshCase(degrees, optimizer="adamw") for degrees in AXES]
    cases += [MeshCase(degrees, model="columns") for degrees in ({"tp": 2}, {"pp": 2}, {"dp": 2}, {"pp": 2, "tp": 2})]
    cases += [MeshCase({"tp": 2}, model="grouped")]
    cases += [MeshCase(degrees, model=model) for degrees in ({"tp": 2}, {"pp": 2}) for model in ("bert", "vit")]
    cases += [MeshCase({"pp": 2, "tp": 2}, model="bert"), MeshCase({"pp": 2, "tp": 2}, model="vit")]
    cases += [MeshCase(degrees, recompute=kind) for degrees in AXES for kind in (True, "selective")]
    cases += [MeshCase(degrees, compile=True) for degrees in AXES]
    cases += [MeshCase({"pp": 2, "schedule": "zero_bubble"}, recompute=True)]
    return cases


def in_the_subset(case: MeshCase) -> bool:
    return (
        case.world == 2
        and case.accumulation == 3
        and not case.compile
        and (case.precision == "fp32" or "tp" in case.degrees)
    )


CASES = [
    pytest.param(case, id=case.name, marks=[] if in_the_subset(case) else [pytest.mark.slow]) for case in every_case()
]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, ranks: Callable[[int], RankPool]) -> Callable[[MeshCase], Curve]:
    items = [item for item in request.session.items if item.fspath == request.fspath]
    chosen = [item.callspec.params["case"] for item in items if hasattr(item, "callspec")]  # type: ignore[attr-defined]

    @functools.cache
    def of_world(world: int) -> dict[str, Curve]:
        cases, curves = [case for case in chosen if case.world == world], []
        for start in range(0, len(cases), AT_ONCE):
            curves += ranks(world).run(run_cases, cases[start : start + AT_ONCE])[0]
        return {case.name: curve for case, curve in zip(cases, curves, strict=True)}

    return lambda case: of_world(case.world)[case.name]


@functools.cache
def reference(precision: str, optimizer: str, model: str) -> Curve:
    return plain(MeshCase({}, precision, optimizer=optimizer, model=model))


@pytest.mark.parametrize("case", CASES)
def test_the_curve_on_a_mesh_is_that_of_plain_pytorch(case: MeshCase, found: Callable[[MeshCase], Curve]) -> None:
    ours, theirs = found(case), reference(case.precision, case.optimizer, case.model)
    assert sum(norm > case.clip for norm in theirs.norms) > 3, "clipping is active"
    differs = largest(ours.losses, theirs.losses), largest(ours.norms, theirs.norms)
    add_row(Row(case.shown, case.precision, case.world, *differs))
    four_stages = case.degrees.get("pp", 1) >= 4
    tolerance = (1e-4 if four_stages else 1e-5) if case.precision == "fp32" else 1e-2
    assert ours.losses == pytest.approx(theirs.losses, rel=tolerance)
    assert ours.norms == pytest.approx(theirs.norms, rel=tolerance)
    assert ours.gradients.keys() == theirs.gradients.keys()
    greatest = max(float(gradient.abs().max()) for gradient in theirs.gradients.values())
    for name, gradient in theirs.gradients.items():
        scale = max(float(gradient.abs().max()), 1e-4 * greatest)  # a key's bias has none but rounding
        near = tolerance if case.precision == "fp32" else 5e-2
        assert torch.allclose(ours.gradients[name], gradient, rtol=near, atol=near * scale), name
    assert ours.weights.keys() == theirs.weights.keys()
