"""Packed rows of one length: every sample once, no row too full, and the cheapest length."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.data.fixed_rows import best_fit, cheapest_rows, filled_in_order
from drivetrain.data.micro_batches import Lengths, Slice
from drivetrain.data.row_shape import Rows

many_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=40)


@given(many_lengths, st.integers(1, 90), st.integers(1, 12))
def test_best_fit_deals_every_sample_once_and_leaves_no_two_rows_that_fit_one(
    lengths: list[int], room: int, bound: int
) -> None:
    tokens = np.array(lengths)
    rows = best_fit(tokens, room, bound)
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(lengths)))
    assert all(len(row) <= bound and (tokens[row].sum() <= room or len(row) == 1) for row in rows)
    if bound >= len(lengths):
        loads = sorted(int(tokens[row].sum()) for row in rows)
        assert len(rows) == 1 or loads[0] + loads[1] > room


def test_a_sample_goes_where_it_leaves_least_room() -> None:
    assert [row.tolist() for row in best_fit(np.array([6, 5, 4, 5]), 10, 9)] == [[0, 2], [1, 3]]
    assert [row.tolist() for row in best_fit(np.array([30, 5]), 10, 9)] == [[0], [1]], "a longer one has its own"


@given(st.integers(1, 300), st.integers(1, 128), st.integers(1, 50))
def test_padding_ends_the_row_with_sequences_no_longer_than_a_sample(total: int, tokens: int, longest: int) -> None:
    positions = Rows(tokens, 3, longest).padding(total)
    assert (total + len(positions)) % tokens == 0
    assert len(positions) < tokens
    assert positions.max(initial=0) < longest
    assert not len(positions) or positions[0] == 0
    assert (positions == 0).sum() == math.ceil(len(positions) / longest)


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_all_ranks_run_as_many_rows_and_every_sample_once(samples: int, world: int, bound: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, indices = rng.integers(1, 40, 100), rng.permutation(100)[:samples]
    lengths = Lengths(tokens, 100, packed=True, rows=Rows(64, 5, 39))
    ranks = [Slice(rank, world, bound, lengths).pieces(indices) for rank in range(world)]
    assert len({len(pieces) for pieces in ranks}) == 1
    assert sorted(i for pieces in ranks for piece in pieces for i in piece) == sorted(indices)
    pieces = [piece for each in ranks for piece in each]
    assert all(len(piece) <= min(bound, 5) and tokens[piece].sum() <= 64 for piece in pieces)


def test_the_length_is_the_one_that_costs_least_over_the_steps() -> None:
    steps = [[np.array([60] * 4)], [np.array([64] * 4)]]
    assert cheapest_rows(steps, 64, bound=8, overhead=0, most=None).tokens == 64, "nothing is filled up"
    assert cheapest_rows(steps, 64, bound=8, overhead=1000, most=None).tokens == 256, "one row a step"
    assert cheapest_rows(steps, 64, bound=2, overhead=1000, most=None).tokens == 128, "of two samples at most"
    found = cheapest_rows(steps, 64, bound=8, overhead=1000, most=200)
    assert (found.tokens, found.samples, found.longest) == (200, 6, 64)


@given(many_lengths, st.integers(1, 90), st.integers(1, 9))
def test_evaluation_fills_rows_in_order(lengths: list[int], tokens: int, bound: int) -> None:
    ranges = filled_in_order(lengths, Rows(tokens, 5, 40), bound)
    assert [index for each in ranges for index in each] == list(range(len(lengths)))
    assert all(0 < len(each) <= min(bound, 5) for each in ranges)
    assert all(len(each) == 1 or sum(lengths[i] for i in each) <= tokens for each in ranges)
    for each, following in itertools.pairwise(ranges):
        more = sum(lengths[i] for i in each) + lengths[following[0]]
        assert len(each) == min(bound, 5) or more > tokens, "none is left half empty"
