"""The error of a win rate is that of Bonett and Price, and its interval covers the true rate even of few prompts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from drivetrain.numerics.win_rates import adjusted_win_rate


@pytest.mark.parametrize(("wins", "losses", "ties"), [(0, 0, 8), (8, 0, 0), (0, 5, 0), (3, 1, 4), (40, 20, 0)])
def test_one_win_and_one_loss_are_added(wins: int, losses: int, ties: int) -> None:
    """As their formula 3 has it: p = (wins + 1) / (n + 2), q = (losses + 1) / (n + 2), and the interval of p - q is
    p - q +- z sqrt((p + q - (p - q)^2) / (n + 2)). A win rate is half of that difference above 1/2."""
    number = wins + losses + ties
    p, q = (wins + 1) / (number + 2), (losses + 1) / (number + 2)
    found = adjusted_win_rate([1.0] * wins + [0.0] * losses + [0.5] * ties)
    assert found.middle == pytest.approx((1 + p - q) / 2)
    assert found.error == pytest.approx(math.sqrt((p + q - (p - q) ** 2) / (number + 2)) / 2)


def test_of_many_prompts_it_is_the_deviation_over_their_root() -> None:
    wins = np.random.default_rng(0).choice([0.0, 0.5, 1.0], 20_000, p=[0.2, 0.5, 0.3])
    found = adjusted_win_rate(wins.tolist())
    assert found.middle == pytest.approx(wins.mean(), abs=1e-4)
    assert found.error == pytest.approx(wins.std(ddof=1) / math.sqrt(len(wins)), rel=1e-3)


@pytest.mark.parametrize("number", [5, 12])
@pytest.mark.parametrize(("p", "q"), [(0.3, 0.3), (0.05, 0.02), (0.9, 0.05), (0.97, 0.02), (0.2, 0.05)])
def test_the_interval_covers_the_rate_of_95_in_100_sets_of_few_prompts(number: int, p: float, q: float) -> None:
    covered = 0.0
    for wins in range(number + 1):
        for losses in range(number - wins + 1):
            ties = number - wins - losses
            ways = math.factorial(number) / math.prod(map(math.factorial, (wins, losses, ties)))
            middle, error = adjusted_win_rate([1.0] * wins + [0.0] * losses + [0.5] * ties)
            if abs(middle - (1 + p - q) / 2) <= 1.96 * error:
                covered += ways * p**wins * q**losses * (1 - p - q) ** ties
    assert covered > 0.94
