from __future__ import annotations

import math

import pytest

from drivetrain.rates import rate_text


@pytest.mark.parametrize(
    ("rate", "decimals", "text"),
    [
        (12345.6, 0, "12,346"),
        (99.6, 0, "100"),
        (6.24, 0, "6.2"),
        (5.0, 0, "5"),
        (0.53, 0, "0.53"),
        (0.0312, 0, "0.031"),
        (0.0, 0, "0"),
        (12.34, 1, "12.3"),
        (100.0, 1, "100.0"),
        (0.0312, 1, "0.031"),
        (math.nan, 0, "nan"),
    ],
)
def test_a_rate_has_at_least_two_figures(rate: float, decimals: int, text: str) -> None:
    assert rate_text(rate, decimals) == text
