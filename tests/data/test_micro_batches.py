"""Tests how a batch is cut: every sample once, as many pieces on every rank, and by length with the least padding."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.data.micro_batches import Lengths, Slice, best_cuts, filled_cuts, packs, rank_share

worlds, bounds = st.integers(1, 5), st.integers(1, 60)


@given(st.integers(1, 200), st.integers(1, 9))
def test_ranks_share_a_batch_without_gap_or_overlap(samples: int, world: int) -> None:
    indices = np.random.default_rng(0).permutation(samples)
    shares = [rank_share(indices, rank, world) for rank in range(world)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 200), worlds, bounds, st.booleans(), st.integers(0, 10**6))
def test_every_sample_once_as_many_pieces_on_every_rank_and_none_too_large(
    samples: int, world: int, bound: int, by_length: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    lengths = Lengths(rng.integers(1, 90, 300), overhead=int(rng.integers(0, 100))) if by_length else None
    indices = rng.permutation(300)[:samples]
    ranks = [Slice(rank, world, bound, lengths).pieces(indices) for rank in range(world)]
    assert len({len(pieces) for pieces in ranks}) == 1
    assert sorted(i for pieces in ranks for piece in pieces for i in piece) == sorted(indices)
    assert all(len(piece) <= bound for pieces in ranks for piece in pieces)
    assert sum(len(piece) == 0 for pieces in ranks for piece in pieces) <= world, "at most one a rank"


@given(st.integers(1, 200), worlds, bounds)
def test_without_lengths_pieces_are_near_equal(samples: int, world: int, bound: int) -> None:
    for rank in range(world):
        sizes = [len(piece) for piece in Slice(rank, world, bound).pieces(np.arange(samples))]
        assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 9))
def test_the_cut_is_the_best_of_all_cuts(lengths: list[int], bound: int) -> None:
    tokens = np.sort(lengths)
    found = best_cuts(tokens, most=4, bound=bound)
    for count in range(1, 5):
        places = itertools.combinations(range(1, len(tokens)), count - 1)
        parts = [np.split(tokens, list(cuts)) for cuts in places]
        costs = [sum(len(p) * p[-1] for p in part) for part in parts if all(0 < len(p) <= bound for p in part)]
        assert (count in found) == bool(costs)
        if costs:
            assert found[count].padded_tokens == min(costs)
            pieces = np.split(tokens, found[count].cuts)
            assert [len(p) > 0 for p in pieces] == [True] * count
            assert sum(len(p) * p[-1] for p in pieces) == min(costs)


@pytest.mark.parametrize(("overhead", "most_padding"), [(10, 0.04), (80, 0.1), (10_000, 0.6)])
def test_padding_is_weighed_against_the_cost_of_a_micro_batch(overhead: int, most_padding: float) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 160, 4000)
    padded = real = pieces = 0
    for step in range(50):
        cut = Slice(0, 1, 32, Lengths(tokens, overhead)).pieces(np.arange(step * 32, step * 32 + 32))
        padded += sum(len(piece) * int(tokens[piece].max()) for piece in cut)
        real += sum(int(tokens[piece].sum()) for piece in cut)
        pieces += len(cut)
    assert 1 - real / padded < most_padding
    assert (pieces == 50) == (overhead == 10_000), "a dear micro-batch is not cut at all"


def test_large_batches_are_cut_in_reasonable_time_and_well() -> None:
    tokens = np.sort(np.random.default_rng(0).integers(1, 2000, 4096))
    found = best_cuts(tokens, most=8, bound=4096)
    assert found[8].padded_tokens < 1.15 * tokens.sum()


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(1, 16),
    st.one_of(st.none(), st.integers(50, 900)),
    st.booleans(),
)
def test_packed_or_padded_every_sample_is_in_one_micro_batch_and_ranks_have_equally_many_within_both_bounds(
    lengths: list[int], world: int, bound: int, most: int | None, packed: bool
) -> None:
    tokens, indices = np.array(lengths), np.arange(len(lengths))
    of_ranks = [Slice(rank, world, bound, Lengths(tokens, 10, packed, most)).pieces(indices) for rank in range(world)]
    assert sorted(int(i) for pieces in of_ranks for piece in pieces for i in piece) == indices.tolist()
    assert len({len(pieces) for pieces in of_ranks}) == 1
    for piece in (piece for pieces in of_ranks for piece in pieces):
        size = int(tokens[piece].sum()) if packed else len(piece) * int(tokens[piece].max(initial=0))
        assert len(piece) <= bound
        if len(lengths) % world == 0:  # else a share is a sample short and may have to be cut evenly
            assert most is None or size <= most or len(piece) == 1


@pytest.mark.parametrize(
    ("samples", "bound", "most"), [(600, 600, 700), (3000, 3000, 700), (1000, 1, None), (700, 3, 5000)]
)
def test_bounds_are_kept_where_a_share_has_very_many_samples(samples: int, bound: int, most: int | None) -> None:
    tokens = np.random.default_rng(0).integers(1, 301, samples)
    tokens[: samples // 2] = 300
    shares = [Slice(rank, 2, bound, Lengths(tokens, 100, False, most)).pieces(np.arange(samples)) for rank in (0, 1)]
    assert len(shares[0]) == len(shares[1])
    pieces = [piece for share in shares for piece in share if len(piece)]
    assert sorted(np.concatenate(pieces).tolist()) == list(range(samples))
    assert max(map(len, pieces)) <= bound
    assert max(len(piece) * tokens[piece].max() for piece in pieces) <= (most or 300)
    fewest = sum(len(filled_cuts(np.sort(tokens[np.concatenate(share)]), bound, most or 1e9)) + 1 for share in shares)
    assert len(pieces) <= fewest + 30, "and no more pieces than it takes"


def test_packs_hold_nearly_as_many_tokens_each() -> None:
    tokens = np.random.default_rng(0).integers(20, 500, 64)
    loads = [int(tokens[pack].sum()) for pack in packs(tokens, 4, 64)]
    assert max(loads) < 1.05 * min(loads)
