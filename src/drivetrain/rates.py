"""Rates as texts."""

from __future__ import annotations


def rate_text(rate: float, decimals: int = 0) -> str:
    """`rate` with so many decimals and at least two significant figures: 1,234; 6.2; 0.031 (a large model on a CPU)."""
    if 0 < abs(rate) < 10 ** (1 - decimals):
        return f"{rate:.2g}"
    return f"{rate:,.{decimals}f}"
