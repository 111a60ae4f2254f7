"""Tests how predictions are timed: every batch, and what a whole prediction does once, once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch

from drivetrain.config.engines import DpEngine
from drivetrain.config.training import Loader
from drivetrain.data.loader import MicroBatch
from drivetrain.engines import replicas
from drivetrain.inference.timing import LEAST_STEPS, _predict
from tests.tiny_workload import Rows, TinyWorkload, perceptron, tiny_engine


class Recording:
    """In the meters' place."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.samples: list[int] = []
        self.within = False

    @contextmanager
    def step(self, batches: list[MicroBatch]) -> Iterator[None]:
        self.batches.append(len(batches[0].tensors["labels"]))
        assert len(self.batches) < 10 * LEAST_STEPS, "it never ends"
        self.within = True
        yield
        self.within = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        assert name == "forward"
        yield

    def step_done(self, samples: int) -> None:
        self.samples.append(samples)


def test_each_batch_is_timed_and_dp_makes_its_replicas_once_a_pass() -> None:
    work = TinyWorkload(perceptron, Rows(8), evaluation=Rows(25))
    engine = tiny_engine(work, config=DpEngine(), devices=2)
    run = SimpleNamespace(evaluation=SimpleNamespace(batch_size=None), micro_batch=10, loader=Loader())
    meters, computed_within = Recording(), []
    forward = work.predict

    def predict(*args: Any) -> Any:
        computed_within.append(meters.within)
        assert not torch.is_grad_enabled()
        return forward(*args)

    work.predict = predict  # type: ignore[method-assign]
    with mock.patch.object(replicas, "replicate", wraps=replicas.replicate) as made:
        rounds = _predict(cast(Any, run), work, engine, cast(Any, meters))
    passes = -(-LEAST_STEPS // 3)
    assert rounds == 3 * passes
    assert meters.batches == meters.samples == [10, 10, 5] * passes
    assert computed_within == [True] * rounds
    assert made.call_count == passes
