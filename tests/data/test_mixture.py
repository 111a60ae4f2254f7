"""Mixtures: shares, the length of an epoch, bounds and weights that change, against sums that are done by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.data.mixed_order import mixed_order
from drivetrain.data.mixture import Phase, Turns, epoch_of, phases_of
from drivetrain.data.order import DrawnOrder, GlobalOrder, MixturePart
from drivetrain.data.streams.mixture import Mix


def test_an_epoch_is_as_long_as_its_way_to_mix_says() -> None:
    """By hand, of sets of 100, 40 and 10: at weights 5, 4 and 1 of 10 they last for 200, 100 and 100 samples."""
    sizes, weights = [100, 40, 10], [5.0, 4.0, 1.0]
    assert epoch_of(sizes, weights, "concat").counts == (75, 60, 15)
    assert epoch_of(sizes, weights, "interleave_under").counts == (50, 40, 10)
    assert epoch_of(sizes, weights, "interleave_over").counts == (100, 80, 20)
    # as Hugging Face's interleave_datasets without probabilities: 3 x the shortest, 3 x the longest
    assert epoch_of(sizes, [1, 1, 1], "interleave_under").samples == 30
    assert epoch_of(sizes, [1, 1, 1], "interleave_over").samples == 300


def test_what_a_bound_leaves_over_goes_to_the_others() -> None:
    sizes, weights = [100, 40, 10], [1.0, 1.0, 2.0]
    assert (
        epoch_of(sizes, weights, "concat").counts == (38, 37, 75) or epoch_of(sizes, weights, "concat").samples == 150
    )
    bounded = epoch_of(sizes, weights, "concat", [None, None, 2.0])
    assert bounded.counts == (65, 65, 20)
    assert epoch_of(sizes, weights, "concat", [0.5, 0.5, 1.0]).counts == (50, 20, 10), "shorter where all are full"


@given(
    st.lists(st.tuples(st.integers(1, 500), st.floats(0.01, 10)), min_size=2, max_size=5),
    st.integers(1, 64),
    st.integers(0, 9),
    st.booleans(),
)
def test_shares_stay_within_one_sample_of_the_weights_at_every_round(
    sets: list[tuple[int, float]], batch: int, seed: int, flows: bool
) -> None:
    weights = tuple(weight for _, weight in sets)
    epoch = None if flows else sum(size for size, _ in sets)
    turns = Turns([Phase(0, weights)], batch, seed, epoch)
    steps, drawn, total = 40, Counter[int](), 0
    for step in range(steps):
        assert turns.drawn_before(step) == [drawn[number] for number in range(len(sets))]
        which, draws = turns.of_step(step)
        for number, draw in zip(which.tolist(), draws.tolist(), strict=True):
            assert draw == drawn[number], "each set's draws come one after the other"
            drawn[number] += 1
        total += len(which)
    assert [turns.of_step(7)[0].tolist()] == [Turns([Phase(0, weights)], batch, seed, epoch).of_step(7)[0].tolist()]
    if epoch is not None and (whole := steps // -(-epoch // batch)):
        counts = turns.drawn_before(whole * -(-epoch // batch))
        exact = np.array(weights) / sum(weights) * epoch * whole
        assert sum(counts) == epoch * whole
        assert (np.abs(counts - exact) < 1 + 1e-6).all()


def test_a_small_weight_gets_its_turns_in_the_course_of_many_rounds() -> None:
    turns = Turns([Phase(0, (1.0, 1e-5))], 1 << 14, 0, None)
    assert turns.drawn_before(4 * 32)[1] == round(32 * (1 << 16) * 1e-5 / (1 + 1e-5))


def test_each_sample_comes_once_an_epoch_where_the_weights_are_the_sizes() -> None:
    order = DrawnOrder([Phase(0, (7.0, 30.0, 3.0))], 6, 0, 40)
    assert order.steps_per_epoch == 7
    for epoch in range(3):
        indices = np.concatenate([order.batch(epoch * 7 + step)[1] for step in range(7)])
        wanted = [(epoch * size + draw) * 3 + number for number, size in enumerate((7, 30, 3)) for draw in range(size)]
        assert sorted(indices.tolist()) == sorted(wanted)
        assert order.batch(epoch * 7)[0] == epoch


def test_weights_change_at_their_steps_and_each_set_is_still_gone_through_in_whole_passes() -> None:
    phases = phases_of([{0: 3.0, 10: 0.0, 20: 1.0}, {0: 1.0, 20: 1.0}])
    assert phases == [Phase(0, (3.0, 1.0)), Phase(10, (0.0, 1.0)), Phase(20, (1.0, 1.0))]
    order = mixed_order([20, 50], Mix(phases, "concat", None), 8, 0)
    shares = []
    for first in (0, 10, 20):
        taken = np.concatenate([order.batch(step)[1] for step in range(first, first + 10)])
        shares.append(int((taken < 20).sum()))
    assert shares[1:] == [0, 40]
    assert abs(shares[0] - 60) <= 2, "of 80, of which three fourths are of the first set"
    assert order.drawn_before(30) == [sum(shares), order.drawn_before(30)[1]]
    everything = np.concatenate([order.batch(step)[1] for step in range(60)])
    for start, stop in ((0, 20), (20, 70)):
        own = everything[(everything >= start) & (everything < stop)] - start
        size = stop - start
        for number in range(len(own) // size):
            assert sorted(own[number * size : (number + 1) * size].tolist()) == list(range(size))
    again = mixed_order([20, 50], Mix(phases, "concat", None), 8, 0)
    assert [again.batch(step)[1].tolist() for step in (45, 3)] == [order.batch(step)[1].tolist() for step in (45, 3)]


@pytest.mark.parametrize(("sizes", "weights"), [([20, 10], [1.0, 3.0]), ([836, 418, 90], [2.0, 2.0, 1.0])])
def test_weights_alone_give_the_order_that_they_always_gave(sizes: list[int], weights: list[float]) -> None:
    """A mixture by weight, as it stood before there were other ways to mix."""
    starts = [0, *np.cumsum(sizes).tolist()]
    parts = [MixturePart(start, stop, weight) for start, stop, weight in zip(starts, starts[1:], weights, strict=False)]
    before = GlobalOrder(sum(sizes), 7, 3, parts)
    now = mixed_order(sizes, Mix([Phase(0, tuple(weights))], "concat", None), 7, 3)
    for step in range(int(3 * before.steps_per_epoch)):
        assert now.batch(step)[1].tolist() == before.batch(step)[1].tolist()
        taken = np.concatenate([np.zeros(0, int), *(before.batch(each)[1] for each in range(step))])
        assert now.drawn_before(step) == np.histogram(taken, starts)[0].tolist()
