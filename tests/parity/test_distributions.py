"""A model beside its teacher, and losses that weigh tokens: on every engine, however the batch is cut, the curve of
plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.parity.cases import Curve
from tests.parity.distribution_cases import DistributionCase, plain, run_cases
from tests.parity.spawned import curves
from tests.ranks import RankPool

SINGLE, DDP, FSDP = {"name": "single"}, {"name": "ddp"}, {"name": "fsdp"}
ZERO3, TP = {"name": "deepspeed", "stage": 3}, {"tp": 2}
FORWARD, REVERSE = {"loss": "forward_kl", "temperature": 2.0}, {"loss": "reverse_kl"}
MIXED = {"loss": {"js": 0.8, "sft": 0.2}}
DFT, EAFT, ASFT = {"loss": "dft"}, {"loss": "eaft"}, {"loss": "asft", "alpha": 2.0}
QUICK = [
    DistributionCase(SINGLE, sft=ASFT),
    DistributionCase(DDP, sft=EAFT),
    DistributionCase(FSDP, sft=ASFT, lora=True),
    DistributionCase(SINGLE, accumulation=1, distillation=MIXED),
    DistributionCase(SINGLE, distillation=FORWARD, packing=False),
    DistributionCase(DDP, distillation=FORWARD),
    DistributionCase(FSDP, distillation=REVERSE, lora=True),
    DistributionCase(ZERO3, distillation=MIXED),
]
SLOW = [
    DistributionCase(SINGLE, sft=DFT),
    DistributionCase(FSDP, sft=ASFT),
    DistributionCase(ZERO3, sft=ASFT),
    DistributionCase({"pp": 2}, sft=DFT, packing=False),
    DistributionCase({"pp": 2}, sft=EAFT, packing=False),
    DistributionCase({"cp": 2}, sft=EAFT, packing=False),
    DistributionCase({**TP, "loss_parallel": True}, sft=DFT, packing=False),
    DistributionCase({**TP, "loss_parallel": True}, sft=EAFT, packing=False),
    DistributionCase(TP, sft=ASFT, packing=False),
    DistributionCase(SINGLE, distillation=REVERSE, lora=True),
    DistributionCase(DDP, distillation=MIXED, packing=False),
    DistributionCase(FSDP, distillation=MIXED),
    DistributionCase(ZERO3, distillation=REVERSE, lora=True),
    DistributionCase({"name": "deepspeed", "stage": 2}, distillation=FORWARD),
    DistributionCase(TP, distillation=MIXED, packing=False),
    DistributionCase({**TP, "loss_parallel": True}, distillation=MIXED, packing=False),
    DistributionCase({"dp": 2, "shard": True}, distillation=FORWARD),
    DistributionCase(FSDP, distillation=MIXED, ranks=4),
    DistributionCase({"dp": 2, "tp": 2}, distillation=REVERSE, packing=False, lora=True),
]


HALVED = [
    pytest.param(DistributionCase(engine, distillation=FORWARD, teacher="bf16"), id=str(engine), marks=marks)
    for engine, marks in ((SINGLE, ()), (FSDP, ()), (ZERO3, ()), (DDP, pytest.mark.slow))
]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, ranks: Callable[[int], RankPool]) -> Callable[[DistributionCase], Curve]:
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
def test_a_loss_over_distributions_has_the_curve_of_plain_pytorch(
    case: DistributionCase, found: Callable[[DistributionCase], Curve]
) -> None:
    ours, theirs = found(case), by_hand(case.alone)
    assert theirs.norms[0] > case.clip, "clipping is active"
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("case", HALVED)
def test_a_teacher_in_16_bits_has_nearly_the_curve_of_one_in_32(
    case: DistributionCase, found: Callable[[DistributionCase], Curve]
) -> None:
    ours, theirs = found(case), by_hand(case.alone)
    assert ours.losses == pytest.approx(theirs.losses, rel=2e-2)
    assert ours.norms == pytest.approx(theirs.norms, rel=5e-2)
    assert ours.losses != pytest.approx(theirs.losses, rel=1e-6), "it is rounded"
