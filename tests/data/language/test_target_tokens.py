"""Targets of a block of texts are those that one text at a time gives, by the plain rule."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.data.flat_encoding import Encoded
from drivetrain.data.language.target_tokens import NO_TARGET, Span, edges_of_targets, target_tokens, token_starts

TEXTS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=8),
        st.lists(st.integers(0, 20), max_size=6),
    ),
    max_size=5,
)


@given(TEXTS)
def test_targets_of_a_block_are_those_of_each_text(texts: list[tuple[list[tuple[int, int]], list[int]]]) -> None:
    spans, targets, tokens = [], [], []
    for pairs, edges in texts:
        place, own = 0, []
        for width, gap in pairs:
            own.append((place, place + width))
            place += width + gap
        edges = sorted(edges[: len(edges) // 2 * 2])
        spans.append([Span(a, b, 0) for a, b in zip(edges[::2], edges[1::2], strict=True)])
        tokens.append(own)
        last = 0
        for start, end in own:
            begins = last if start == end else start
            targets.append(any(a <= begins < b for a, b, _ in spans[-1]))
            last = max(last, end)
    flat = np.array([pair for own in tokens for pair in own], np.int64).reshape(-1, 2)
    lengths = np.array([len(own) for own in tokens], np.int64)
    encoded = Encoded(np.zeros(len(flat), np.int32), lengths, flat)
    assert target_tokens(encoded, spans).tolist() == targets
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    first, last_target = edges_of_targets(np.array(targets, bool), offsets)
    for number, (start, stop) in enumerate(pairwise(offsets.tolist())):
        places = [place for place in range(1, stop - start) if targets[start + place]]
        assert (first[number], last_target[number]) == ((places[0], places[-1]) if places else (NO_TARGET, 0))


def test_a_token_without_width_stands_where_the_one_before_it_ends() -> None:
    encoded = Encoded(np.zeros(3, np.int32), np.array([3]), np.array([[0, 2], [0, 0], [3, 4]]))
    assert token_starts(encoded, slice(0, 3)).tolist() == [0, 2, 3]
