"""The running cell, as its events show it."""

from __future__ import annotations

import math
from pathlib import Path

from drivetrain.compare.live import _progress
from drivetrain.tracking.events import StepDone
from drivetrain.tracking.jsonl import JsonlTracker


def test_a_loss_that_is_not_finite_is_shown_and_ends_nothing(tmp_path: Path) -> None:
    JsonlTracker(tmp_path).handle(StepDone(3, 0.5, math.nan, math.inf, 1e-3, None, 0, 30, 5.0, 2.0))
    assert _progress(tmp_path) == "step 3  loss nan  5 samples/s"
