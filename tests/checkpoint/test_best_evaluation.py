"""The loop, which sees one evaluation after the other, and retention, which sees all, agree on the best."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.checkpoint.best_evaluation import gain, ranked

SCORES = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 0.5000001, 2.0]), min_size=1)


@given(SCORES, st.booleans())
def test_the_last_that_gained_is_the_first_of_the_ranking(scores: list[float], higher: bool) -> None:
    best: tuple[float, int] | None = None
    for step, value in enumerate(scores):
        if gain(value, best[0] if best else None, higher) > 0:
            best = (value, step)
    assert best is not None
    assert ranked(zip(scores, range(len(scores)), strict=True), higher)[0] == best[1]


@pytest.mark.parametrize(("higher", "order"), [(True, ["c", "e", "a"]), (False, ["a", "c", "e"])])
def test_equals_keep_their_order_and_what_is_not_finite_is_left_out(higher: bool, order: list[str]) -> None:
    scores = [(0.1, "a"), (math.nan, "b"), (0.9, "c"), (math.inf, "d"), (0.9, "e"), (-math.inf, "f")]
    assert ranked(scores, higher) == order
