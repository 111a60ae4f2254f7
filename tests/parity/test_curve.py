"""Promise 1: the engine, the number of ranks and the cut of the batch change neither loss nor gradient norm.

Every case is compared with plain PyTorch in one process: twelve steps with clipping active, a ragged last batch, valid
targets and lengths that differ from sample to sample. `make parity` runs all cases and writes the table in the docs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.device import chosen_device
from tests.parity.cases import CLIP, ON_DEVICE, Case, Curve, largest, plain, run_case, run_cases
from tests.parity.table import Row, add_row
from tests.ranks import RankPool

AT_ONCE = 20
TOLERANCE = {"fp32": 1e-5, "bf16-mixed": 1e-2, "bf16-master": 1e-2}
SHARDED: dict[str, list[dict[str, Any]]] = {
    "deepspeed": [{"stage": stage} for stage in range(4)],
    "accelerate": [{"driver": driver} for driver in ("ddp", "fsdp", "zero1", "zero2", "zero3")],
}


def every_case() -> list[Case]:
    """engines x precisions x worlds x accumulation x models, and the engines' options."""
    cases = [
        Case(engine, world, precision, accumulation, optimizer, model)
        for engine in ("dp", "ddp", "fsdp")
        for world in (1, 2, 4)
        for precision in ("fp32", "bf16-mixed")
        for accumulation in (1, 3)
        for optimizer, model in (("sgd", "perceptron"), ("adamw", "perceptron"), ("sgd", "tagger"))
    ]
    cases += [
        Case(engine, world, precision, accumulation, optimizer, model, options)
        for engine, kinds in SHARDED.items()
        for options in kinds
        for world in (2, 4)
        for precision in ("fp32", "bf16-mixed")
        for accumulation in (1, 3)
        for optimizer, model in (("sgd", "perceptron"), ("adamw", "perceptron"), ("sgd", "tagger"))
    ]
    cases += [
        Case(engine, world, "bf16-master", 3, optimizer, "blocks", options)
        for engine, options in (
            ("fsdp", {}),
            ("deepspeed", {"stage": 1}),
            ("deepspeed", {"stage": 2}),
            ("deepspeed", {"stage": 3}),
            ("accelerate", {"driver": "fsdp"}),
            ("accelerate", {"driver": "zero2"}),
        )
        for world in (2, 4)
        for optimizer in ("sgd", "adamw")
    ]
    for engine, options, world in (
        ("ddp", {"shard_optimizer": True}, 2),
        ("ddp", {"shard_optimizer": True}, 4),
        ("ddp", {"static_graph": True}, 2),
        ("ddp", {"find_unused": True}, 2),
        ("ddp", {"bucket_mb": 0.001}, 2),
        ("fsdp", {"reshard": False}, 2),
        ("fsdp", {"reshard": False}, 4),
        ("fsdp", {"hybrid": 2}, 4),
        ("fsdp", {"wrap": ["Linear"]}, 2),
        ("fsdp", {"wrap": "size", "wrap_min_parameters": 100}, 2),
        ("fsdp", {"meta": True}, 2),
        ("fsdp", {"offload": True}, 2),
        ("deepspeed", {"stage": 1, "offload_optimizer": "cpu"}, 2),
        ("deepspeed", {"stage": 2, "offload_optimizer": "cpu"}, 2),
        ("deepspeed", {"stage": 3, "offload_optimizer": "cpu"}, 2),
        ("deepspeed", {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}, 2),
        ("deepspeed", {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}, 4),
        ("deepspeed", {"config": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 64}}}, 2),
        ("accelerate", {"driver": {"name": "fsdp", "wrap": ["Linear"], "reshard": False}}, 2),
        ("accelerate", {"driver": {"name": "fsdp", "wrap": "size", "wrap_min_parameters": 100}}, 2),
        ("accelerate", {"driver": {"name": "fsdp", "hybrid": 2}}, 4),
        ("accelerate", {"driver": {"name": "fsdp", "offload": True}}, 2),
        ("accelerate", {"driver": {"name": "ddp", "static_graph": True}}, 2),
    ):
        cases += [
            Case(engine, world, accumulation=3, optimizer=o, model="blocks", options=options) for o in ("sgd", "adamw")
        ]
    for kind in (True, "selective"):
        cases += [Case(engine, 2, accumulation=3, model="blocks", recompute=kind) for engine in ("ddp", "fsdp")]
        cases += [Case("deepspeed", 2, accumulation=3, model="blocks", options={"stage": 3}, recompute=kind)]
    for engine, options in (("ddp", {}), ("fsdp", {}), ("deepspeed", {"stage": 2}), ("deepspeed", {"stage": 3})):
        cases += [Case(engine, 2, accumulation=3, model="blocks", options=options, compile=True)]
    return cases


def in_the_subset(case: Case) -> bool:
    """Returns whether make test runs it: every engine and option at two ranks, of ragged targets; two engines at four;
    fp32 under AdamW on one engine."""
    if case.compile or case.accumulation != 3:
        return False
    if case.world == 2:
        precise = case.precision == "fp32" and (case.optimizer == "sgd" and case.model != "perceptron")
        rounded = case.precision != "fp32" and case.optimizer == "adamw"
        return precise or rounded or case == Case("fsdp", 2, accumulation=3, optimizer="adamw")
    some = case.engine in ("dp", "fsdp") and (case.model == "tagger" if not case.options else "hybrid" in case.options)
    return case.world == 4 and some and case.precision == "fp32" and case.optimizer == "sgd"


def here(case: Case) -> bool:
    """Returns whether a case tells something of the tests' device."""
    return chosen_device() == "cpu" or case.engine in ON_DEVICE


CASES = [
    pytest.param(case, id=case.name, marks=[] if in_the_subset(case) else [pytest.mark.slow])
    for case in filter(here, every_case())
]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, ranks: Callable[[int], RankPool]) -> Callable[[Case], Curve]:
    """The curve of a case; all chosen cases of one world run in one go, a few before the ranks say a word."""
    items = [item for item in request.session.items if item.fspath == request.fspath]
    chosen = [item.callspec.params["case"] for item in items if hasattr(item, "callspec")]  # type: ignore[attr-defined]

    @functools.cache
    def of_world(world: int) -> dict[str, Curve]:
        cases, curves = [case for case in chosen if case.processes == world], []
        for start in range(0, len(cases), AT_ONCE):
            curves += ranks(world).run(run_cases, cases[start : start + AT_ONCE])[0]
        return {case.name: curve for case, curve in zip(cases, curves, strict=True)}

    def of(case: Case) -> Curve:
        return run_case(case) if case.engine == "dp" else of_world(case.processes)[case.name]

    return of


@pytest.fixture(scope="module")
def reference() -> Callable[[Case], Curve]:
    known: dict[tuple[str, str, str], Curve] = {}

    def of(case: Case) -> Curve:
        key = case.precision, case.optimizer, case.model
        if key not in known:
            known[key] = plain(case)
        return known[key]

    return of


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("case", CASES)
def test_the_curve_is_that_of_plain_pytorch(
    case: Case, found: Callable[[Case], Curve], reference: Callable[[Case], Curve]
) -> None:
    ours, theirs = found(case), reference(case)
    assert sum(norm > CLIP for norm in theirs.norms) > 3, "clipping is active"
    differs = largest(ours.losses, theirs.losses), largest(ours.norms, theirs.norms)
    add_row(Row(case.shown, case.precision, case.world, *differs))
    tolerance = TOLERANCE[case.precision]
    assert ours.losses == pytest.approx(theirs.losses, rel=tolerance)
    assert ours.norms == pytest.approx(theirs.norms, rel=tolerance)
    for name, gradient in theirs.gradients.items():
        scale = float(gradient.abs().max())
        near = tolerance if case.precision == "fp32" else 5e-2  # of single elements, 16 bits round more than of a norm
        assert torch.allclose(ours.gradients[name], gradient, rtol=near, atol=near * scale), name
    assert ours.weights.keys() == theirs.weights.keys()
