"""Engines that are alone in their group, which on a GPU is NCCL's: what one GPU can show of them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from drivetrain.launch.group import group_of_one
from tests.parity.cases import Case, largest, plain, run_case
from tests.parity.test_curve import TOLERANCE


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_an_engine_alone_in_its_group_trains_as_plain_pytorch(engine: str, precision: str, device: str) -> None:
    case = Case(engine, 1, precision, accumulation=3, model="blocks")
    with group_of_one(True):
        assert ("nccl" if device == "cuda" else "gloo") in str(dist.get_backend_config())
        ours = run_case(case)
    theirs = plain(case)
    assert largest(ours.losses, theirs.losses) <= TOLERANCE[precision]
    assert largest(ours.norms, theirs.norms) <= TOLERANCE[precision]
    assert ours.weights.keys() == theirs.weights.keys()
