"""Advantages, against their formulas with numpy, and answers whose reward is not known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drivetrain.workloads.advantages import SMALL, advantages

REWARDS = torch.tensor([[1.0, 0.0, 0.5, 0.0], [2.0, 2.0, 2.0, 2.0], [3.0, -1.0, 0.0, 1.0]])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_reward_is_compared_with_its_groups_mean(scale: str) -> None:
    each = REWARDS.numpy().astype(np.float64)
    by = {"group": each.std(1, ddof=1, keepdims=True) + SMALL, "batch": each.std(ddof=1) + SMALL, "none": 1.0}
    expected = (each - each.mean(1, keepdims=True)) / by[scale]
    found = advantages(REWARDS, scale, leave_one_out=False)
    assert found.numpy() == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    found = advantages(REWARDS, "none", leave_one_out=True)
    assert found[2].tolist() == pytest.approx([3 - 0, -1 - 4 / 3, 0 - 1, 1 - 2 / 3])


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_unknown_rewards_are_left_out_of_their_group(leave_one_out: bool) -> None:
    nan = float("nan")
    known = torch.tensor([[1.0, 0.0, 5.0]])
    expected = advantages(known, "group", leave_one_out)[0].tolist()
    found = advantages(torch.tensor([[1.0, nan, 0.0, 5.0], [nan, nan, nan, 4.0]]), "group", leave_one_out)
    assert found[0].tolist() == pytest.approx([expected[0], 0, *expected[1:]])
    assert found[1].tolist() == [0, 0, 0, 0]
