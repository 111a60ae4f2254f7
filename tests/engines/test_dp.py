"""Tests which replicas dp makes where; what they compute is in test_replicas.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain.config.engines import DpEngine
from drivetrain.data.loader import MicroBatch
from drivetrain.engines import dp
from drivetrain.engines.replicas import ThreadReplicas
from drivetrain.workloads.base import Batch, few
from tests.tiny_workload import Rows, TinyWorkload, perceptron, tiny_engine


def test_a_cpus_replicas_are_threads_and_gpus_are_counted_from_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = dp.wrap_dp(nn.Linear(2, 2), torch.device("cpu"), 3)
    assert isinstance(wrapped, ThreadReplicas)
    assert wrapped.num_replicas == 3
    monkeypatch.setattr(dp, "GpuReplicas", lambda _, device_ids: device_ids)
    assert dp.wrap_dp(nn.Linear(2, 2), torch.device("cuda", 1), 3) == [1, 2, 3]  # type: ignore[comparison-overlap]


def test_passes_without_gradient_see_the_weights_as_they_are_after_each_step() -> None:
    """As statistics of a batch and samples that the model makes ask for them, with no evaluation in between."""
    work = TinyWorkload(perceptron, Rows(8))
    batch = few(work, 4)
    engine = tiny_engine(work, config=DpEngine(replicas=2), devices=2)

    def scores(model: nn.Module, tensors: Batch) -> torch.Tensor:
        return model(tensors["features"]).clone()

    for _ in range(2):
        [found] = engine.without_gradient([MicroBatch(batch)], scores)
        alone = perceptron()
        alone.load_state_dict(engine.weights())
        torch.testing.assert_close(found, alone(batch["features"]).detach())
        engine.forward_backward([MicroBatch(batch)])
        engine.optimizer_step(1.0)
