"""Answers that share their prompt in a row: where each begins, and how much of it they share."""

from __future__ import annotations

import numpy as np
import pytest

from drivetrain.data.branches import Sample, begins_of, shared_tokens


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
