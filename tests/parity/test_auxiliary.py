"""A trained head, a reference that follows the model and a frozen teacher: on every engine the curve of plain PyTorch
in one process, and a resumed run has the bits of one that was not interrupted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.parity.auxiliary_cases import STEPS, Run, gone_on, plain, run_cases
from tests.parity.mesh_cases import MeshCase
from tests.ranks import RankPool

MODEL = "columns"
SINGLE, FSDP = MeshCase({"name": "single"}, model=MODEL), MeshCase({"name": "fsdp"}, model=MODEL)
CASES = [
    SINGLE,
    MeshCase({"name": "ddp"}, model=MODEL),
    FSDP,
    *(MeshCase({"name": "deepspeed", "stage": stage}, model=MODEL) for stage in (2, 3)),
    MeshCase({"tp": 2}, model=MODEL),
    MeshCase({"dp": 2, "shard": True}, model=MODEL),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("auxiliary")


@pytest.fixture(scope="module")
def found(ranks: Callable[[int], RankPool], root: Path) -> Callable[[MeshCase], tuple[Run, Run]]:
    @functools.cache
    def of_world(world: int) -> dict[str, tuple[Run, Run]]:
        cases = [case for case in CASES if case.world == world]
        runs = ranks(world).run(run_cases, cases, root)[0]
        return {case.name: run for case, run in zip(cases, runs, strict=True)}

    return lambda case: of_world(case.world)[case.name]


@pytest.mark.long
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_auxiliary_models_have_the_curve_of_plain_pytorch_and_resume_to_the_bit(
    case: MeshCase, found: Callable[[MeshCase], tuple[Run, Run]]
) -> None:
    (whole, resumed), theirs = found(case), plain(case.clip)
    assert sum(norm > case.clip for norm in theirs.norms) > 3, "clipping is active"
    assert whole.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert whole.norms == pytest.approx(theirs.norms, rel=1e-5)
    assert (resumed.losses, resumed.norms) == (whole.losses[-3:], whole.norms[-3:])
    assert resumed.weights.keys() == whole.weights.keys()
    assert "drivetrain_auxiliary.head.weight" in whole.weights
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())


@pytest.mark.long
def test_what_fsdp_saved_goes_on_in_one_process_and_not_beside_another_teacher(
    found: Callable[[MeshCase], tuple[Run, Run]], ranks: Callable[[int], RankPool], root: Path
) -> None:
    whole, _ = found(FSDP)
    [saved] = (root / FSDP.name).glob("step-*")
    [losses] = ranks(1).run(gone_on, SINGLE, saved, "seed 22")
    assert losses == pytest.approx(whole.losses[-3:], rel=1e-5)
    assert len(whole.losses) == STEPS
    [why] = ranks(1).run(gone_on, SINGLE, saved, "another")
    assert "teacher was seed 22 when the checkpoint was made, and is another now" in why
