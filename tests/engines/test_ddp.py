"""Tests what DDP reports when it did not engage, or a step failed; its training is compared in tests/parity."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.config import engines as config
from drivetrain.engines.autograd import AutogradEngine
from drivetrain.engines.ddp import DdpEngine
from drivetrain.errors import RunError, UserError
from drivetrain.launch.group import group_of_one


def engine(**parts: Any) -> DdpEngine:
    """An engine before set-up, with these parts."""
    made = object.__new__(DdpEngine)
    vars(made).update(parts)
    return made


@pytest.mark.parametrize(
    ("raised", "expected", "text"),
    [
        (RuntimeError("... `find_unused_parameters=True` ..."), RunError, "find_unused: true"),
        (RuntimeError("shapes differ"), RuntimeError, "shapes differ"),
    ],
)
def test_only_ddps_own_complaint_is_explained(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception], text: str
) -> None:
    def failing(*_: object) -> None:
        raise raised

    monkeypatch.setattr(AutogradEngine, "forward_backward", failing)
    with pytest.raises(RuntimeError, match=text) as found:
        engine().forward_backward([])
    assert type(found.value) is expected


def test_a_group_of_other_ranks_than_the_runs_did_not_engage() -> None:
    with pytest.raises(RunError, match="belongs to no group"):
        engine()._check_engaged()
    with group_of_one(True):
        forward = DistributedDataParallel(nn.Linear(2, 2))
        engine(_forward=forward, _ranks=SimpleNamespace(world=1))._check_engaged()
        with pytest.raises(RunError, match="joins 1 ranks, but the run has 2"):
            engine(_forward=forward, _ranks=SimpleNamespace(world=2))._check_engaged()


def test_gradients_are_exchanged_in_buckets_of_ddps_own_size_by_default() -> None:
    with group_of_one(True):
        plain = DistributedDataParallel(nn.Linear(2, 2))
    assert config.DdpEngine().bucket_mb * 2**20 == plain.bucket_bytes_cap


def test_a_parameter_without_a_gradient_is_named_unless_ddp_looks_for_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    model[1].bias.requires_grad_(True)
    with pytest.raises(UserError, match=r"engine.find_unused: 1.bias got no gradient"):
        engine(_model=model, _config=config.DdpEngine())._check_used()
    for looks in ({"find_unused": True}, {"static_graph": True}):
        engine(_model=model, _config=config.DdpEngine(**looks))._check_used()
