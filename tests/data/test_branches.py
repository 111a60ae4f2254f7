"""Answers that share their prompt in a row: where each begins, and how much of it they share."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.data import branches
from drivetrain.data.branches import Sample, begins_of, shared_of_all, shared_tokens
from drivetrain.data.language.samples import TokenSamples


def test_a_sequence_begins_at_0_and_a_branch_where_positions_fall_back() -> None:
    positions = np.array([[0, 1, 2, 3, 2, 3, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    assert np.flatnonzero(begins_of(positions)[0]).tolist() == [0, 4, 6, 7]
    assert np.flatnonzero(begins_of(positions)[1]).tolist() == [0]


def sample(ids: list[int], first_target: int) -> Sample:
    return np.array(ids, dtype=np.int32), np.arange(len(ids)) >= first_target


@pytest.mark.parametrize(
    ("samples", "shared"),
    [
        pytest.param([sample([1, 2, 3, 7], 3), sample([1, 2, 3, 8, 9], 3)], 2, id="all of a prompt but its last token"),
        pytest.param([sample([1, 2, 3, 7], 3), sample([1, 4, 3, 8, 9], 3)], 1, id="up to where prompts differ"),
        pytest.param([sample([1, 2, 3, 7], 1), sample([1, 2, 3, 8, 9], 3)], 0, id="nothing behind a target"),
        pytest.param([sample([1, 2, 3], 9), sample([1, 2, 3, 8], 9)], 1, id="without a target"),
        pytest.param([sample([5, 7], 0), sample([6, 7], 0)], 0, id="no prompt"),
    ],
)
def test_samples_share_the_tokens_before_any_target_is_predicted(samples: list[Sample], shared: int) -> None:
    assert shared_tokens(samples) == shared


SAMPLE = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=9)


def stored(samples: list[list[tuple[int, bool]]]) -> TokenSamples:
    lengths = np.array([len(each) for each in samples], dtype=np.int64)
    flat = [token for each in samples for token in each]
    ids, targets = np.array([i for i, _ in flat], np.int32), np.array([t for _, t in flat], bool)
    return TokenSamples(ids, targets, lengths.cumsum() - lengths, lengths, [""] * len(samples))


@given(pairs=st.lists(st.tuples(SAMPLE, SAMPLE), min_size=1, max_size=6), at_once=st.integers(1, 6))
def test_all_pairs_together_share_as_much_as_each_alone(pairs: list[Any], at_once: int) -> None:
    one, other = (stored([pair[side] for pair in pairs]) for side in (0, 1))
    with mock.patch.object(branches, "AT_ONCE", at_once):
        found = shared_of_all(one, other)
    assert found.tolist() == [shared_tokens([one.load(n, 0), other.load(n, 0)]) for n in range(len(pairs))]
