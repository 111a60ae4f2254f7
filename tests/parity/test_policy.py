"""Answers rewarded and learned from: on every engine, however the batch is cut, the answers and the curve of one
process, which are those of plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.parity.policy_cases import BETA, CLIP, PolicyCase, plain, run_case, run_cases
from tests.parity.spawned import curves
from tests.ranks import RankPool

SINGLE, DDP, FSDP = {"name": "single"}, {"name": "ddp"}, {"name": "fsdp"}
HELD, SEQUENCE, DAPO = {"beta": BETA}, {"importance": "sequence"}, {"loss": "dapo"}
CAPPED = {"loss": "dapo", "importance_cap": 0.75}  # below 1, so that it weighs the tokens of a model in fp32 too
QUICK = [
    PolicyCase(SINGLE, learning=HELD),
    PolicyCase(SINGLE, learning=HELD, shared=False),
    PolicyCase(SINGLE, learning=SEQUENCE, packing=False),
    PolicyCase(DDP, learning=HELD),
    PolicyCase(FSDP, learning=HELD),
    PolicyCase(DDP, learning=DAPO),
    PolicyCase(SINGLE, learning=CAPPED),
    PolicyCase(FSDP, learning=CAPPED),
]
SLOW = [
    PolicyCase(SINGLE, learning=DAPO),
    PolicyCase(FSDP, learning=SEQUENCE),
    PolicyCase(FSDP, learning=DAPO, packing=False),
    PolicyCase({"name": "deepspeed", "stage": 3}, learning=HELD),
    PolicyCase({"tp": 2}, learning=HELD, packing=False),
]

PPO = [PolicyCase(engine, stage="ppo", learning=HELD) for engine in (SINGLE, DDP, FSDP)]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, ranks: Callable[[int], RankPool]) -> Callable[[PolicyCase], Any]:
    return curves(request, ranks, run_cases, lambda case: case.world, at_once=8)


@functools.cache
def alone(learning: str) -> Any:
    case = next(each for each in (*QUICK, *SLOW) if str(each.learning) == learning)
    _, answers = run_case(PolicyCase(SINGLE, learning=case.learning))
    return plain(case, answers), answers


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name) for case in QUICK]
    + [pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in SLOW],
)
def test_rewards_give_the_curve_of_plain_pytorch(case: PolicyCase, found: Callable[[PolicyCase], Any]) -> None:
    (ours, answers), (theirs, drawn) = found(case), alone(str(case.learning))
    assert answers == drawn
    assert theirs.norms[0] > CLIP, "clipping is active"
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5, abs=1e-6)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in PPO])
def test_a_value_head_beside_the_policy_gives_the_curve_of_one_process(
    case: PolicyCase, found: Callable[[PolicyCase], Any]
) -> None:
    """tests/workloads/test_ppo.py compares its loss with plain PyTorch; here the batch is cut, and spread."""
    (ours, answers), (theirs, drawn) = found(case), whole_batches()
    assert answers == drawn
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5, abs=1e-6)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)


@functools.cache
def whole_batches() -> Any:
    return run_case(PolicyCase(SINGLE, stage="ppo", learning=HELD), pieces=1)
