"""The ranks' samples of the first step are its global batch: each once, none missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.data.loader import MicroBatch, Window
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.errors import RunError
from drivetrain.training import batching
from drivetrain.training.batching import check_shares, one_ahead
from tests.launch.test_start import prepared
from tests.tiny_workload import TinyWorkload, perceptron, tiny_engine

ORDER = GlobalOrder(40, 7, 0)
BATCH = ORDER.batch(0)[1].tolist()
Cli = Callable[..., tuple[int, str, str]]


class Two(Communicator):
    """The first of two ranks, and what the second one says it takes."""

    def __init__(self, other: list[int]) -> None:
        super().__init__()
        self.other = other

    def all_gather(self, value: Any) -> list[Any]:
        return [value, self.other]


def shares() -> tuple[list[int], list[int]]:
    first, second = (
        [int(i) for piece in Slice(rank, 2, 2).pieces(ORDER.batch(0)[1]) for i in piece] for rank in (0, 1)
    )
    assert sorted(first + second) == sorted(BATCH)
    return first, second


def engine() -> Engine:
    return tiny_engine(TinyWorkload(perceptron))


def test_shares_that_are_the_batch_pass() -> None:
    check_shares(ORDER, Slice(0, 2, 2), engine(), Two(shares()[1]))


def test_a_sample_that_two_ranks_take_is_refused_by_its_number() -> None:
    first, second = shares()
    with pytest.raises(RunError, match=f"batch of 7: taken once too often: samples {first[0]}; missing: none"):
        check_shares(ORDER, Slice(0, 2, 2), engine(), Two([*second, first[0]]))


def test_a_sample_that_no_rank_takes_is_refused_by_its_number() -> None:
    _, second = shares()
    with pytest.raises(RunError, match=f"taken once too often: none; missing: samples {second[0]}\\."):
        check_shares(ORDER, Slice(0, 2, 2), engine(), Two(second[1:]))


def test_one_taken_twice_in_place_of_another_is_refused_though_the_number_is_right() -> None:
    first, second = shares()
    with pytest.raises(RunError, match=f"too often: samples {first[0]}; missing: samples {second[0]}"):
        check_shares(ORDER, Slice(0, 2, 2), engine(), Two([*second[1:], first[0]]))


def test_a_rank_whose_samples_another_one_has_as_well_does_not_count() -> None:
    idle = engine()
    idle.counts_samples = False
    check_shares(ORDER, Slice(0, 2, 2), idle, Two(BATCH))


def test_a_run_asks_before_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivetrain: Cli) -> None:
    monkeypatch.chdir(prepared(tmp_path))
    real = batching.window_slice

    def half(*given: Any) -> Slice:
        mine = real(*given)
        return Slice(0, 2, mine.micro_batch_size, mine.lengths)

    monkeypatch.setattr(batching, "window_slice", half)
    code, _, words = drivetrain("train", "run.yaml", "output=out", "--quiet")
    assert code == 1
    assert "are not its global batch of 8: taken once too often: none; missing: samples" in words
    assert not list((tmp_path / "out").glob("checkpoints/*"))


def test_an_engine_knows_of_each_window_before_the_one_before_it_is_computed() -> None:
    batches = [MicroBatch({"x": torch.full((1,), float(step))}) for step in range(3)]
    windows = [Window(step, 0, np.arange(1), [batch], largest=1) for step, batch in enumerate(batches)]
    done: list[str] = []
    given = one_ahead(iter(windows), lambda batches: done.append(f"expects {int(batches[0].tensors['x'])}"))
    for window in given:
        done.append(f"computes {window.step}")
    assert [each for each in done if each.startswith("computes")] == ["computes 0", "computes 1", "computes 2"]
    assert [each for each in done if each.startswith("expects")] == ["expects 1", "expects 2"]
    assert done.index("expects 1") < done.index("computes 0")
    assert list(one_ahead(iter(()), lambda _: None)) == []
