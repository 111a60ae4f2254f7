"""Decides which evaluation is the best: one rule for the loop, early stopping, retention, the report and `evaluate`.

The best is the evaluation with the best finite value of the deciding metric; of equal values, the earliest. The loop
keeps it in its progress, which every checkpoint holds: a run that goes on from a checkpoint has the best of the steps
that led there. Checkpoints are ranked by the same rule, so that the first of them is the best's own, unless that
evaluation was not saved, or its checkpoint is gone or damaged. Then the report names no best checkpoint, and `evaluate`
takes the first that is there and says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def gain(value: float, best: float | None, higher_is_better: bool) -> float:
    """Returns how far a finite value passes the best of the steps before. It is the new best only above 0."""
    if best is None:
        return math.inf
    return value - best if higher_is_better else best - value


def ranked(scores: Iterable[tuple[float, T]], higher_is_better: bool) -> list[T]:
    """Returns the scored items, the best first. scores: in the order of their steps; those that are not finite are left
    out."""
    finite = [(value, each) for value, each in scores if math.isfinite(value)]
    return [each for _, each in sorted(finite, key=lambda pair: pair[0], reverse=higher_is_better)]
