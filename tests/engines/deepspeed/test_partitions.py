"""Tests what a rank of ZeRO holds of the weights, by the addresses of DeepSpeed's buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from drivetrain.engines.deepspeed import partitions
from tests.parity.cases import Case, engine_of, workload
from tests.parity.promises import steps
from tests.ranks import RankPool

pytest.importorskip("deepspeed")


def trained(shares: bool) -> tuple[dict[str, Tensor], int, int, int]:
    """After three steps of stage 3: the weights, bytes of this rank's shards, of all buffers that hold weights, and
    those that the engine counts for both."""
    work = workload("perceptron")
    with mock.patch.object(partitions, "share_masters", partitions.share_masters if shares else lambda _: None):
        engine: Any = engine_of(Case("deepspeed", 2, optimizer="adamw", options={"stage": 3}), work)
    steps(engine, work, range(3))
    zero = engine._zero.optimizer
    held = {each.data_ptr(): each.nbytes for each in (*zero.fp16_partitioned_groups_flat, *partitions.masters(zero))}
    shards = sum(each.nbytes for each in zero.fp16_partitioned_groups_flat)
    counted = sum(each.nbytes for each in [*zero.fp16_partitioned_groups_flat, *partitions.masters_apart(zero)])
    return engine.weights(), shards, sum(held.values()), counted


def both() -> tuple[Any, Any]:
    return trained(True), trained(False)


@pytest.mark.long
def test_stage_3_in_fp32_holds_its_weights_once_and_trains_the_same(ranks: Callable[[int], RankPool]) -> None:
    (weights, shards, held, counted), (expected, their_shards, their_held, _) = ranks(2).run(both)[0]
    assert held == counted == shards == their_shards
    assert their_held == 2 * their_shards, "DeepSpeed shares them itself by now: drop share_masters"
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name])
