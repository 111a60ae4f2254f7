"""How many examples a property test draws."""

from __future__ import annotations

import os

FEW = "DRIVETRAIN_TEST_FEW_EXAMPLES"  # make test sets it
FEWEST = 10


def examples(number: int) -> int:
    """Returns the number, or a quarter of it in make test."""
    return max(number // 4, min(number, FEWEST)) if FEW in os.environ else number
