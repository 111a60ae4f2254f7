"""Promise 1 for losses of more than one sum: distillation from a frozen teacher, terms with divisors of their own, and
statistics of the whole global batch have the curve of plain PyTorch in one process, however the batch is cut."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from tests.parity.cases import Curve
from tests.parity.loss_cases import LossCase, plain, run_cases
from tests.parity.spawned import curves
from tests.ranks import RankPool

ENGINES = [{"name": "ddp"}, {"name": "fsdp"}, {"name": "deepspeed", "stage": 3}, {"tp": 2}]
LOSSES = ("distil", "mixture", "kto", "sorted")
MODEL = "sft-padded"
QUICK = ("mixture-ddp", "kto-ddp", "distil-fsdp", "sorted-fsdp", "distil-deepspeed", "kto-2")
EVERY = [LossCase(engine, model=MODEL, loss=loss) for engine in ENGINES for loss in LOSSES]


def is_quick(case: LossCase) -> bool:
    """Returns what make test runs of every engine and loss: each of both, not each with each."""
    return f"{case.loss}-{case.degrees.get('name', case.degrees.get('tp'))}" in QUICK


CASES = [
    *(LossCase({"name": "single"}, model=MODEL, loss=loss) for loss in LOSSES),
    *filter(is_quick, EVERY),
    LossCase({"pp": 2}, model=MODEL, loss="mixture"),
    LossCase({"name": "fsdp"}, model="sft-padded-lora", loss="kto"),
    LossCase({"name": "fsdp"}, model="sft-padded-qlora", loss="distil"),
]
REST = [
    *(case for case in EVERY if not is_quick(case)),
    *(
        LossCase(engine, model=f"sft-padded-{method}", loss=loss)
        for engine in ({"name": "single"}, *ENGINES[:3])
        for method in ("lora", "qlora")
        for loss in LOSSES
    ),
    *(
        LossCase({"tp": 2}, model=f"sft-padded-{method}", loss=loss)
        for method in ("lora", "wide-qlora")
        for loss in LOSSES
    ),
    *(LossCase({"pp": 2}, model=f"sft-padded-{method}", loss="mixture") for method in ("lora", "wide-qlora")),
    *(LossCase({"name": "deepspeed", "stage": 2}, model=MODEL, loss=loss) for loss in LOSSES),
    *(LossCase({"dp": 2, "shard": True}, model=MODEL, loss=loss) for loss in LOSSES),
    *(
        LossCase({"dp": 2, "tp": 2, **shard}, model=MODEL, loss=loss)
        for shard in ({}, {"shard": True})
        for loss in LOSSES
    ),
    *(LossCase({"name": "accelerate", "driver": driver}, model=MODEL, loss="kto") for driver in ("fsdp", "zero3")),
    *(LossCase({"name": "fsdp", **more}, model=MODEL, loss="kto") for more in ({"meta": True}, {"reshard": False})),
]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, ranks: Callable[[int], RankPool]) -> Callable[[LossCase], Curve]:
    return curves(request, ranks, run_cases, lambda case: case.world, 20)


@functools.cache
def reference(loss: str, model: str) -> Curve:
    return plain(LossCase({}, model=model, loss=loss))


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case.name) for case in CASES),
        *(pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in REST),
    ],
)
def test_a_loss_has_the_curve_of_plain_pytorch(case: LossCase, found: Callable[[LossCase], Curve]) -> None:
    ours, theirs = found(case), reference(case.loss, case.model)
    assert sum(norm > case.clip for norm in theirs.norms) > 3, "clipping is active"
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-5)
    assert ours.terms == [pytest.approx(terms, rel=1e-5) for terms in theirs.terms]
    assert ours.gradients.keys() == theirs.gradients.keys()
    greatest = max(float(gradient.abs().max()) for gradient in theirs.gradients.values())
    for name, gradient in theirs.gradients.items():
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-4, atol=1e-4 * greatest, msg=name)
