"""Divides a whole number into whole shares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Returns whole numbers that add up to `total`, as near to the weights as whole numbers can be (largest
    remainders)."""
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * total
    found = np.floor(exact).astype(int)
    for number in np.argsort(found - exact, kind="stable")[: total - int(found.sum())]:
        found[number] += 1
    return [int(count) for count in found]
