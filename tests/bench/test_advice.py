"""Made comparisons with the noise of real runs: a winner is seldom claimed of equal rows, and found where there is one.

bench/results/advice.md has the shares over a thousand comparisons each; here fewer are made, from a fixed seed.
"""

from __future__ import annotations

import numpy as np
import pytest

from bench.advice import SPREADS, Pool, Setting, claims, read_pool

COMPARISONS = 200
# 5 % of them, and three standard deviations of such a count
FEW, MOST = 0.05 + 3 * (0.05 * 0.95 / COMPARISONS) ** 0.5, 0.9 - 3 * (0.9 * 0.1 / COMPARISONS) ** 0.5


@pytest.fixture(scope="module")
def pool() -> Pool:
    return read_pool()


@pytest.mark.parametrize(
    "setting",
    [
        Setting(rows=2, seeds=1),
        Setting(rows=2, seeds=3),
        Setting(rows=2, seeds=5, shared=True),
        Setting(rows=4, seeds=5, by_engine=True),
    ],
)
def test_of_equal_rows_a_winner_is_claimed_in_at_most_one_of_twenty(pool: Pool, setting: Setting) -> None:
    claimed, _ = claims(pool, setting, COMPARISONS, np.random.default_rng(0))
    assert claimed <= FEW


@pytest.mark.parametrize(
    "setting",
    [
        Setting(rows=2, seeds=5, quicker=SPREADS),
        Setting(rows=4, seeds=5, quicker=SPREADS, by_engine=True, shared=True),
        Setting(rows=2, seeds=5, better=SPREADS),
    ],
)
def test_a_row_ahead_by_three_spreads_is_found_in_nine_of_ten(pool: Pool, setting: Setting) -> None:
    _, found = claims(pool, setting, COMPARISONS, np.random.default_rng(0))
    assert found >= MOST


def test_one_run_that_was_disturbed_claims_nothing(pool: Pool) -> None:
    assert claims(pool, Setting(2, 1, shared=True, quicker=10.0), 20, np.random.default_rng(0)) == (0.0, 0.0)
