"""Samples in their order, cut into micro-batches: bounds are kept, none is lost, and none is fuller than it must be."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.data.ordered_cuts import OrderedSizes, fewest_pieces, ordered_pieces


def load(sizes: OrderedSizes, piece: np.ndarray) -> int:
    """The tokens of a micro-batch, counted from its samples alone."""
    tokens, shared = sizes.tokens[piece], sizes.shared[piece]
    return int(tokens.sum() - shared[1:].sum()) if sizes.packed else int(tokens.max()) * len(piece)


@st.composite
def several(draw: st.DrawFn) -> OrderedSizes:
    tokens = draw(st.lists(st.integers(1, 40), min_size=1, max_size=7))
    shared = [draw(st.integers(0, min(own, before) - 1)) for before, own in pairwise([tokens[0], *tokens])]
    return OrderedSizes(np.array(tokens), np.array(shared), draw(st.booleans()))


def every_cut(count: int, pieces: int) -> list[list[np.ndarray]]:
    return [np.split(np.arange(count), each) for each in combinations(range(1, count), pieces - 1)]


@given(sizes=several(), bound=st.integers(1, 8), most=st.integers(1, 120))
def test_the_pieces_are_the_fewest_and_the_fullest_has_least(sizes: OrderedSizes, bound: int, most: int) -> None:
    count, total = fewest_pieces(sizes, bound, most), len(sizes.tokens)
    found = ordered_pieces(sizes, count, bound, most)
    assert np.concatenate(found).tolist() == list(range(total))

    def fits(cut: list[np.ndarray]) -> bool:
        return all(len(piece) <= bound and (len(piece) == 1 or load(sizes, piece) <= most) for piece in cut)

    def fullest(cut: list[np.ndarray]) -> int:
        return max([load(sizes, piece) for piece in cut if len(piece) > 1], default=0)

    assert fits(found)
    allowed = [cut for pieces in range(1, count + 1) for cut in every_cut(total, pieces) if fits(cut)]
    assert min(map(len, allowed)) == count
    assert fullest(found) == min(map(fullest, allowed))


def test_tokens_that_neighbours_share_count_once_but_where_a_piece_begins() -> None:
    """Four answers of 10 tokens behind a prompt of 20: 60 tokens in one piece, 40 in each of two."""
    sizes = OrderedSizes(np.full(4, 30), np.array([0, 20, 20, 20]), packed=True)
    assert fewest_pieces(sizes, 4, 60) == 1
    assert [piece.tolist() for piece in ordered_pieces(sizes, fewest_pieces(sizes, 4, 59), 4, 59)] == [[0, 1], [2, 3]]
    assert [load(sizes, piece) for piece in ordered_pieces(sizes, 2, 4, 59)] == [40, 40]


@pytest.mark.parametrize("count", [3, 5])
def test_a_rank_that_needs_fewer_pieces_than_another_has_empty_ones(count: int) -> None:
    sizes = OrderedSizes(np.array([5, 5]), np.array([0, 0]), packed=True)
    assert [len(piece) for piece in ordered_pieces(sizes, count, 8, 20)] == [1, 1, *[0] * (count - 2)]


def test_a_rank_without_samples_has_an_empty_piece() -> None:
    nothing = OrderedSizes(np.zeros(0, np.int64), np.zeros(0, np.int64), packed=True)
    assert fewest_pieces(nothing, 8, 20) == 1
    assert [len(piece) for piece in ordered_pieces(nothing, 2, 8, 20)] == [0, 0]
