"""The order of the data: every sample once an epoch, a function of (seed, step) alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.data.order import GlobalOrder, MixturePart

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


def dealt(order: GlobalOrder, epochs: range) -> np.ndarray:
    steps = range(epochs.start * order.steps_per_epoch, epochs.stop * order.steps_per_epoch)
    return np.concatenate([order.batch(step)[1] for step in steps])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 30), st.data())
def test_a_mixture_takes_parts_by_weight_and_each_of_them_pass_after_pass(
    sizes_of_parts: list[int], batch: int, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 9), min_size=len(sizes_of_parts), max_size=len(sizes_of_parts)))
    ends = np.cumsum(sizes_of_parts).tolist()
    parts = [
        MixturePart(end - size, end, weight) for end, size, weight in zip(ends, sizes_of_parts, weights, strict=True)
    ]
    order = GlobalOrder(ends[-1], batch, 0, parts)
    taken = dealt(order, range(3))
    assert len(taken) == 3 * ends[-1]
    for part in parts:
        of_part = taken[(taken >= part.start) & (taken < part.stop)]
        expected = 3 * ends[-1] * part.weight / sum(weights)
        assert abs(len(of_part) - expected) <= 3
        times = np.bincount(of_part - part.start, minlength=part.size)
        assert times.max() - times.min() <= 1


def test_a_mixture_of_two_to_two_to_one_is_mixed_in_every_stretch() -> None:
    order = GlobalOrder(2090, 10, 0, [MixturePart(0, 999, 2), MixturePart(999, 1999, 2), MixturePart(1999, 2090, 1)])
    taken = dealt(order, range(1))
    assert [((taken >= a) & (taken < b)).sum() for a, b in ((0, 999), (999, 1999), (1999, 2090))] == [836, 836, 418]
    first, last = taken[:500], taken[-500:]
    assert 60 < (first >= 1999).sum() < 140
    assert 60 < (last >= 1999).sum() < 140


@given(sizes, st.integers(1, 30))
def test_a_stream_takes_every_sample_once_and_none_from_far_away(samples: int, buffer: int) -> None:
    taken = dealt(GlobalOrder(samples, 7, 0, buffer=buffer), range(1))
    assert sorted(taken.tolist()) == list(range(samples))
    assert (np.abs(taken - np.arange(samples)) < buffer).all()


def test_a_mixture_of_streams_takes_each_of_them_in_its_own_order() -> None:
    taken = dealt(GlobalOrder(200, 16, 0, [MixturePart(0, 100, 1), MixturePart(100, 200, 1)], buffer=10), range(1))
    for start in (0, 100):
        own = taken[(taken >= start) & (taken < start + 100)] - start
        assert (np.abs(own - np.arange(len(own))) < 10).all()
