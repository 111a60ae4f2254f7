"""Which replicas dp makes where; what they compute is in test_replicas.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain.engines import dp
from drivetrain.engines.replicas import ThreadReplicas


def test_a_cpus_replicas_are_threads_and_gpus_are_counted_from_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = dp.wrap_dp(nn.Linear(2, 2), torch.device("cpu"), 3)
    assert isinstance(wrapped, ThreadReplicas)
    assert wrapped.num_replicas == 3
    monkeypatch.setattr(dp, "GpuReplicas", lambda _, device_ids: device_ids)
    assert dp.wrap_dp(nn.Linear(2, 2), torch.device("cuda", 1), 3) == [1, 2, 3]  # type: ignore[comparison-overlap]
