"""A model beside its teacher: on every engine, however the batch is cut, the curve of plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.parity.cases import Curve
from tests.parity.distillation_cases import CLIP, DistillCase, plain, run_cases
from tests.parity.spawned import curves
from tests.ranks import RankPool

SINGLE, DDP, FSDP = {"name": "single"}, {"name": "ddp"}, {"name": "fsdp"}
ZERO3, TP = {"name": "deepspeed", "stage": 3}, {"tp": 2}
FORWARD, REVERSE = {"loss": "forward_kl", "temperature": 2.0}, {"loss": "reverse_kl"}
MIXED = {"loss": {"js": 0.8, "sft": 0.2}}
QUICK = [
    DistillCase(SINGLE, accumulation=1, distillation=MIXED),
    DistillCase(SINGLE, distillation=FORWARD, packing=False),
    DistillCase(DDP, distillation=FORWARD),
    DistillCase(FSDP, distillation=REVERSE, lora=True),
    DistillCase(ZERO3, distillation=MIXED),
]
SLOW = [
    DistillCase(SINGLE, distillation=REVERSE, lora=True),
    DistillCase(DDP, distillation=MIXED, packing=False),
    DistillCase(FSDP, distillation=MIXED),
    DistillCase(ZERO3, distillation=REVERSE, lora=True),
    DistillCase({"name": "deepspeed", "stage": 2}, distillation=FORWARD),
    DistillCase(TP, distillation=MIXED, packing=False),
    DistillCase({**TP, "loss_parallel": True}, distillation=MIXED, packing=False),
    DistillCase({"dp": 2, "shard": True}, distillation=FORWARD),
    DistillCase({"dp": 2, "tp": 2}, distillation=REVERSE, packing=False, lora=True),
]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, ranks: Callable[[int], RankPool]) -> Callable[[DistillCase], Curve]:
    return curves(request, ranks, run_cases, lambda case: case.world, at_once=8)


@functools.cache
def by_hand(alone: tuple[str, bool]) -> Curve:
    return plain(next(case for case in (*QUICK, *SLOW) if case.alone == alone))


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name) for case in QUICK]
    + [pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in SLOW],
)
def test_distillation_has_the_curve_of_plain_pytorch(case: DistillCase, found: Callable[[DistillCase], Curve]) -> None:
    ours, theirs = found(case), by_hand(case.alone)
    assert theirs.norms[0] > CLIP, "clipping is active"
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)
