"""Advantages of answers: how much better each was rewarded than the others of its group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SMALL = 1e-4  # added to a standard deviation, as in TRL


def advantages(rewards: Tensor, scale: str, leave_one_out: bool) -> Tensor:
    """Returns (groups, answers) fp32. rewards: alike; NaN for an answer without one, whose advantage is 0 and which its
    group does not count.

    A reward less the group's mean: Shao et al. 2024, "DeepSeekMath", section 4.1.2; leave_one_out: less the mean of the
    others: Ahmadian et al. 2024, "Back to Basics", equation 8. scale: what divides it: the standard deviation (n - 1)
    of the group or of the batch, or none (Liu et al. 2025, Dr. GRPO).
    """
    rewards = rewards.double()
    known = ~rewards.isnan()
    counts, sums = known.sum(1, keepdim=True), rewards.nansum(1, keepdim=True)
    baseline = (sums - rewards) / (counts - 1) if leave_one_out else sums / counts
    found = rewards - baseline
    if scale == "group":
        found = found / (deviations(rewards) + SMALL)
    elif scale == "batch":
        found = found / (deviations(rewards[known][None]) + SMALL)
    return torch.where(counts > 1, found, 0.0).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).float()


def gae(rewards: Tensor, values: Tensor, gamma: float, decay: float) -> Tensor:
    """Returns the advantage of each of an answer's tokens, (T,): Schulman et al. 2016, "High-Dimensional Continuous
    Control Using Generalized Advantage Estimation", equation 16. rewards, values: (T,); the answer's end is worth 0.
    decay: λ."""
    found, after, later = torch.zeros_like(values), 0.0, 0.0
    for place in range(len(values) - 1, -1, -1):
        surprise = float(rewards[place]) + gamma * later - float(values[place])
        after = surprise + gamma * decay * after
        found[place], later = after, float(values[place])
    return found


def whitened(parts: Sequence[Tensor]) -> list[Tensor]:
    """Returns the parts less the mean of all their numbers, divided by their standard deviation."""
    whole = torch.cat(list(parts)).double()
    if len(whole) < 2:
        return list(parts)
    shifted = (whole - whole.mean()) / (whole.std() + 1e-8)
    return list(shifted.float().split([len(each) for each in parts]))


def deviations(rewards: Tensor) -> Tensor:
    """Returns the standard deviation of each row's numbers, (rows, 1); 0 of fewer than two."""
    counts = (~rewards.isnan()).sum(1, keepdim=True)
    squares = (rewards - rewards.nanmean(1, keepdim=True)).square().nansum(1, keepdim=True)
    return (squares / (counts - 1).clamp(min=1)).sqrt()
