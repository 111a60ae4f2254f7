"""Pairs of answers beside a reference: on every engine, however the batch is cut, the curve of plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.parity.cases import Curve
from tests.parity.preference_cases import CLIP, PairCase, plain, run_cases
from tests.parity.spawned import curves
from tests.ranks import RankPool

SINGLE, DDP, FSDP = {"name": "single"}, {"name": "ddp"}, {"name": "fsdp"}
ZERO3, TP = {"name": "deepspeed", "stage": 3}, {"tp": 2}
MIXED, SORTED = {"loss": {"sigmoid": 0.8, "sft": 0.2}}, {"loss": "aot_unpaired"}
CENTRED = {"centring": 0.1}
STEPS = {"loss": "steps"}
KTO = {"desirable_weight": 1.5, "undesirable_weight": 0.75}
QUICK = [
    PairCase(SINGLE, accumulation=1),
    PairCase(SINGLE, shared=False),
    PairCase(SINGLE, packing=False, preference=MIXED),
    PairCase(SINGLE, preference=SORTED),
    PairCase(SINGLE, stage="kto", preference=KTO),
    PairCase(SINGLE, stage="kto", preference=KTO, shared=False),
    PairCase(SINGLE, stage="reward", preference=CENTRED),
    PairCase(SINGLE, stage="reward", preference=CENTRED, shared=False),
    PairCase(SINGLE, stage="reward", preference=CENTRED, packing=False),
    PairCase(DDP, stage="kto", preference=KTO),
    PairCase(DDP, preference=SORTED),
    PairCase(FSDP, lora=True),
    PairCase(ZERO3),
    PairCase(FSDP, stage="reward", preference=CENTRED),
    PairCase(SINGLE, stage="reward", preference=STEPS),
    PairCase(SINGLE, stage="reward", preference=STEPS, packing=False),
    PairCase(DDP, stage="reward", preference=STEPS),
    PairCase(FSDP, stage="reward", preference=STEPS),
]
SLOW = [
    PairCase(SINGLE, lora=True),
    PairCase(SINGLE, stage="orpo"),
    PairCase(DDP, shared=False),
    PairCase(DDP, stage="reward", preference=CENTRED),
    PairCase(ZERO3, stage="reward", preference=CENTRED),
    PairCase(TP, stage="reward", preference=CENTRED, packing=False),
    PairCase(FSDP, stage="kto", preference=KTO, packing=False),
    PairCase(ZERO3, stage="kto", preference=KTO, lora=True),
    PairCase(TP, stage="kto", preference=KTO, packing=False),
    PairCase({"dp": 2, "shard": True}, stage="kto", preference=KTO, packing=False),
    PairCase(DDP),
    PairCase(DDP, lora=True, preference=MIXED),
    PairCase(FSDP, preference=MIXED),
    PairCase(FSDP, preference={"loss": "bco_pair"}),
    PairCase(ZERO3, lora=True, preference=SORTED),
    PairCase({"name": "deepspeed", "stage": 2}, preference=SORTED),
    PairCase({"dp": 2, "shard": True}, preference={"loss": "bco_pair"}, packing=False),
    PairCase(TP, packing=False),
    PairCase(TP, packing=False, lora=True),
    PairCase({"pp": 2}, stage="orpo", packing=False),
    PairCase({"dp": 2, "tp": 2}, packing=False, preference=SORTED),
    PairCase(SINGLE, lora=True, nf4=True),
    PairCase(DDP, lora=True, nf4=True, ranks=4),
    PairCase(FSDP, lora=True, nf4=True, ranks=4),
    PairCase(ZERO3, lora=True, nf4=True, ranks=4, preference=SORTED),
    PairCase(FSDP, stage="kto", preference=KTO, lora=True, nf4=True, ranks=4),
    PairCase(DDP, stage="reward", preference=CENTRED, ranks=4),
    PairCase(SINGLE, stage="reward", preference=STEPS, lora=True),
    PairCase(ZERO3, stage="reward", preference=STEPS),
    PairCase(TP, stage="reward", preference=STEPS, packing=False),
    PairCase(FSDP, stage="reward", preference=STEPS, ranks=4),
]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, ranks: Callable[[int], RankPool]) -> Callable[[PairCase], Curve]:
    return curves(request, ranks, run_cases, lambda case: case.world, at_once=8)


@functools.cache
def by_hand(alone: tuple[str, str, bool, bool]) -> Curve:
    return plain(next(case for case in (*QUICK, *SLOW) if case.alone == alone))


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name) for case in QUICK]
    + [pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in SLOW],
)
def test_preferences_have_the_curve_of_plain_pytorch(case: PairCase, found: Callable[[PairCase], Curve]) -> None:
    ours, theirs = found(case), by_hand(case.alone)
    assert theirs.norms[0] > CLIP, "clipping is active"
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)
