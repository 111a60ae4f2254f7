"""Formats rates and sizes as texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rate_text(rate: float, decimals: int = 0) -> str:
    """Formats `rate` with so many decimals and at least two significant figures: 1,234; 6.2; 0.031 (a large model on a
    CPU)."""
    if 0 < abs(rate) < 10 ** (1 - decimals):
        return f"{rate:.2g}"
    return f"{rate:,.{decimals}f}"


def figures_text(number: float) -> str:
    """Formats `number` with three significant figures, of a large one all before the point: 11,900; 31.4; 0.0123."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def size_text(size: float) -> str:
    """Formats bytes in MiB, and below a tenth of one in KiB: "1,234.5 MiB", "7.9 KiB"."""
    return f"{size / 2**20:,.1f} MiB" if not size or abs(size) >= 0.1 * 2**20 else f"{size / 2**10:,.1f} KiB"


def flops_text(rate: float) -> str:
    """Formats FLOP/s in billions, and below a hundredth of one in millions: "12.34 GFLOP/s", "0.37 MFLOP/s"."""
    return f"{rate / 1e9:,.2f} GFLOP/s" if not rate or rate >= 1e7 else f"{rate_text(rate / 1e6, 1)} MFLOP/s"


def set_text(found: Mapping[str, Any]) -> str:
    """Formats one data set of a mixture: "identity: 4,096 samples, 20.0 %; loss 2.8986 token_accuracy 0.8514"."""
    text = f"{found['name']}: {found['samples']:,} samples, {found['share']:.1%}"
    values = "  ".join(
        f"{name} {value:.4f}" for name, value in found.items() if name not in ("name", "samples", "share")
    )
    return f"{text}; {values}" if values else text
