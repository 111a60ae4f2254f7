from __future__ import annotations

import math

import pytest

from drivetrain.tracking.quantities import flops_text, rate_text, size_text


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


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0.0 MiB"), (848, "0.8 KiB"), (104_000, "101.6 KiB"), (105_000, "0.1 MiB"), (3 << 30, "3,072.0 MiB")],
)
def test_a_small_size_is_not_shown_as_none(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0.0, "0.00 GFLOP/s"),
        (2_000.0, "0.002 MFLOP/s"),
        (4.2e6, "4.2 MFLOP/s"),
        (1e7, "0.01 GFLOP/s"),
        (3e12, "3,000.00 GFLOP/s"),
    ],
)
def test_a_slow_rate_of_arithmetic_is_not_shown_as_none(rate: float, text: str) -> None:
    assert flops_text(rate) == text
