"""The order of the data: every sample once an epoch, a function of (seed, step) alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.data.order import GlobalOrder, micro_batches, rank_share

sizes = st.integers(1, 200)


@given(sizes, st.integers(1, 50), st.integers(0, 5), st.booleans())
def test_every_epoch_takes_each_sample_once(samples: int, batch: int, seed: int, grouped: bool) -> None:
    lengths = np.random.default_rng(0).integers(1, 90, samples).tolist() if grouped else None
    order = GlobalOrder(samples, batch, seed, lengths)
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
    copied = order.copy()
    for step in steps:
        epoch, indices = order.batch(step)
        again_epoch, again = GlobalOrder(samples, batch, seed=3).batch(step)
        assert epoch == again_epoch
        assert np.array_equal(indices, again)
        assert np.array_equal(indices, copied.batch(step)[1])


def test_seeds_and_epochs_differ() -> None:
    first = GlobalOrder(100, 100, seed=0)
    assert not np.array_equal(first.batch(0)[1], first.batch(1)[1])
    assert not np.array_equal(first.batch(0)[1], GlobalOrder(100, 100, seed=1).batch(0)[1])


def test_like_lengths_share_a_batch_and_long_batches_are_not_last() -> None:
    lengths = np.random.default_rng(0).integers(5, 300, 3000)

    def padded(order: GlobalOrder) -> float:
        batches = [lengths[order.batch(step)[1]] for step in range(order.steps_per_epoch)]
        return sum(len(batch) * batch.max() for batch in batches) / lengths.sum()

    assert padded(GlobalOrder(3000, 32, seed=0)) > 1.7
    grouped = GlobalOrder(3000, 32, seed=0, lengths=lengths.tolist())
    assert padded(grouped) < 1.1
    means = [lengths[grouped.batch(step)[1]].mean() for step in range(grouped.steps_per_epoch)]
    assert abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.4


@given(sizes, st.integers(1, 9))
def test_ranks_share_a_batch_without_gap_or_overlap(samples: int, world: int) -> None:
    indices = np.random.default_rng(0).permutation(samples)
    shares = [rank_share(indices, rank, world) for rank in range(world)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(0, 200), st.integers(1, 60))
def test_micro_batches_are_near_equal_in_order_and_bounded(samples: int, bound: int) -> None:
    pieces = micro_batches(np.arange(samples), bound)
    assert [i for piece in pieces for i in piece] == list(range(samples))
    if pieces:
        assert max(map(len, pieces)) <= bound
        assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
