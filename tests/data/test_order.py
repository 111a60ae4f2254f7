"""The order of the data: every sample once an epoch, a function of (seed, step) alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.data.order import GlobalOrder

sizes = st.integers(1, 200)


@given(sizes, st.integers(1, 50), st.integers(0, 5))
def test_every_epoch_takes_each_sample_once(samples: int, batch: int, seed: int) -> None:
    order = GlobalOrder(samples, batch, seed)
    for epoch in (0, 1):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        dealt = [order.batch(step) for step in steps]
        assert {found for found, _ in dealt} == {epoch}
        assert sorted(np.concatenate([indices for _, indices in dealt]).tolist()) == list(range(samples))
        sizes_dealt = sorted(len(indices) for _, indices in dealt)
        assert sizes_dealt == sorted([batch] * (samples // batch) + [samples % batch] * (samples % batch > 0))


@given(sizes, st.integers(1, 50), st.lists(st.integers(0, 300), max_size=8))
def test_a_step_takes_the_same_samples_whenever_it_is_asked(samples: int, batch: int, steps: list[int]) -> None:
    order = GlobalOrder(samples, batch, seed=3)
    for step in steps:
        epoch, indices = order.batch(step)
        again_epoch, again = GlobalOrder(samples, batch, seed=3).batch(step)
        assert epoch == again_epoch
        assert np.array_equal(indices, again)


def test_seeds_and_epochs_differ() -> None:
    first = GlobalOrder(100, 100, seed=0)
    assert not np.array_equal(first.batch(0)[1], first.batch(1)[1])
    assert not np.array_equal(first.batch(0)[1], GlobalOrder(100, 100, seed=1).batch(0)[1])
