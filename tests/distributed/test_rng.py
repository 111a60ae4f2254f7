"""Every generator goes on where it stood."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from drivetrain.checkpoint.state import join, split
from drivetrain.distributed.rng import restore_mark, restore_rng_state, rng_mark, rng_state, seed_everything


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), *np.random.randn(3), *torch.randn(3).tolist()]


def test_a_restored_state_draws_the_same_again_after_a_round_trip_through_a_checkpoint() -> None:
    seed_everything(3)
    random.gauss(0, 1)  # both libraries keep half of a pair of normal numbers
    np.random.randn()
    tensors, tree = split(rng_state())
    first = draw()
    draw()
    restore_rng_state(join(tensors, tree))
    assert draw() == first


def test_a_seed_decides_all_generators() -> None:
    seed_everything(5)
    first = draw()
    seed_everything(5)
    assert draw() == first
    seed_everything(6)
    assert not set(draw()) & set(first)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Stand-ins for the generators of four visible GPUs, of which this process uses the third."""
    states = [torch.tensor([number], dtype=torch.uint8) for number in range(4)]

    def give(state: torch.Tensor) -> None:
        states[2] = state

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: states[2].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", give)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: pytest.fail("the other devices are other ranks'"))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda _: pytest.fail("the other devices are other ranks'"))
    return states


def numbers(states: list[torch.Tensor]) -> list[int]:
    return [int(state) for state in states]


def test_a_process_keeps_the_generator_of_its_own_gpu(devices: list[torch.Tensor]) -> None:
    mark, state = rng_mark(), rng_state()
    assert len(state["cuda"]) == 1
    for restore in (lambda: restore_mark(mark), lambda: restore_rng_state(state)):
        devices[2] = torch.tensor([99], dtype=torch.uint8)
        restore()
        assert numbers(devices) == [0, 1, 2, 3]


@pytest.mark.parametrize(("saved", "expected"), [([7], 7), ([10, 11, 12, 13], 12), ([20, 21], 20)])
def test_a_checkpoint_with_the_states_of_more_or_fewer_gpus_restores_this_one(
    saved: list[int], expected: int, devices: list[torch.Tensor]
) -> None:
    """As earlier versions saved them: one for each device that a rank saw."""
    state = {**rng_state(), "cuda": [torch.tensor([number], dtype=torch.uint8) for number in saved]}
    restore_rng_state(state)
    assert numbers(devices) == [0, 1, expected, 3]
