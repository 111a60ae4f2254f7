"""The means of judged answers, as an evaluation reports them."""

from __future__ import annotations

import math

from drivetrain.training.judging import means_of
from drivetrain.workloads.generating import JudgedAnswer


def test_the_loss_of_answers_without_reward_is_no_negative_zero() -> None:
    found = means_of([JudgedAnswer({"reward": 0.0}, {}), JudgedAnswer({"reward": 0.0}, {})])
    assert math.copysign(1, found["loss"]) == 1
    assert means_of([JudgedAnswer({"reward": 0.25}, {})])["loss"] == -0.25
