"""The losses of answers with advantages, each a function of the answers' log-probabilities.

Notation: r the ratio π(token) / π_old(token) to the model that drew the answers, or (`importance: sequence`) the whole
answer's; A the advantage; sg stops the gradient. A function returns (N,) losses of the N tokens of a batch, which
`averaged` adds up so that the engine's division by the count of the global batch makes the mean that the loss's row in
config/reinforcement.py names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain.config.reinforcement import LARGEST_RATIO, LOSSES, Mean, Reinforcement

LEAST_WEIGHT = 1e-8  # of an answer in VESPO, before its logarithm


@dataclass(frozen=True)
class Tokens:
    """Values of N tokens of answers, (N,) each: log-probabilities under the policy, with gradient, and under the model
    that drew them; advantages. owner: (N,) int64, the answer of each; lengths: (answers,), tokens of each answer."""

    policy: Tensor
    old: Tensor
    advantages: Tensor
    owner: Tensor
    lengths: Tensor

    def of_answers(self, values: Tensor) -> Tensor:
        """Returns the sum of each answer's values, (answers,)."""
        return torch.zeros(len(self.lengths), dtype=values.dtype, device=values.device).index_add(0, self.owner, values)

    def ratios(self, importance: str) -> Tensor:
        """Returns r of each token. Of a whole answer: Zheng et al. 2025, "Group Sequence Policy Optimization", equation
        7, the geometric mean of its tokens' ratios."""
        logs = self.policy - self.old
        if importance == "sequence":
            logs = (self.of_answers(logs) / self.lengths.clamp(min=1))[self.owner]
        return logs.exp()


Formula = Callable[[Tokens, Reinforcement, str], Tensor]  # the last: the level of the ratio


def clipped(tokens: Tokens, settings: Reinforcement, importance: str) -> Tensor:
    """Returns -min(r A, clip(r, 1 - ε, 1 + ε_high) A): Shao et al. 2024, "DeepSeekMath", equation 3 (GRPO); with
    ε_high: Yu et al. 2025, "DAPO", equation 10; Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.1
    (Dr. GRPO). delta bounds r alone: INTELLECT-2 (Prime Intellect 2025), section 3.4."""
    ratios = tokens.ratios(importance)
    bounded = ratios.clamp(*settings.bounds)
    if settings.delta is not None:
        ratios = ratios.clamp(max=settings.delta)
    return -torch.minimum(ratios * tokens.advantages, bounded * tokens.advantages)


def cispo(tokens: Tokens, settings: Reinforcement, importance: str) -> Tensor:
    """Returns -sg(min(r, ε_max)) A log π: MiniMax 2025, "MiniMax-M1", equation 4, with the bound of Khatri et al. 2025,
    "The Art of Scaling Reinforcement Learning Compute"."""
    largest = LARGEST_RATIO if settings.clip_high is None else settings.clip_high
    return -tokens.ratios(importance).clamp(max=largest).detach() * tokens.advantages * tokens.policy


def sapo(tokens: Tokens, settings: Reinforcement, importance: str) -> Tensor:
    """Returns -(4 / τ) σ(τ (r - 1)) A, τ by the sign of A: Gao et al. 2025, "Soft Adaptive Policy Optimization",
    equation 6."""
    positive, others = settings.temperatures
    tau = torch.where(tokens.advantages > 0, positive, others)
    return -torch.sigmoid(tau * (tokens.ratios(importance) - 1)) * 4 / tau * tokens.advantages


def vespo(tokens: Tokens, settings: Reinforcement, importance: str) -> Tensor:
    """Returns -φ(w) A log π, w the product of an answer's ratios, φ(w) = exp(λ) w^k exp(-λ w), without gradient:
    "VESPO: Variational Sequence-Level Soft Policy Optimization" (2026); k and λ by the sign of A."""
    del importance  # the ratio is of the whole answer, and the loss of each token
    with torch.no_grad():
        lowest = torch.log(torch.tensor(LEAST_WEIGHT)).item()
        logs = tokens.of_answers((tokens.policy - tokens.old).clamp(-20.0, 20.0)).clamp(lowest, 20.0)[tokens.owner]
        favoured = tokens.advantages >= 0
        k = torch.where(favoured, settings.shapes[0], settings.shapes[2])
        lam = torch.where(favoured, settings.shapes[1], settings.shapes[3]).clamp(min=1e-4)
        weights = (lam + k * logs - lam * logs.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return -weights * tokens.advantages * tokens.policy


def rloo(tokens: Tokens, settings: Reinforcement, importance: str) -> Tensor:
    """Returns each token the clipped loss of its answer, whose r is the product of the tokens' ratios: Ahmadian et al.
    2024, "Back to Basics", section 3.2, with the clipping of TRL's trainer for several updates."""
    del importance
    ratios = tokens.of_answers(tokens.policy - tokens.old)[tokens.owner].exp()
    return -torch.minimum(ratios * tokens.advantages, ratios.clamp(*settings.bounds) * tokens.advantages)


FORMULAS: Mapping[str, Formula] = {
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "bnpo", "luspo", "ppo"), clipped),
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "rloo": rloo,
}
assert FORMULAS.keys() == LOSSES.keys()


def divergences(policy: Tensor, reference: Tensor) -> Tensor:
    """Returns the estimate of each token's divergence from the reference, (N,) >= 0: q - log q - 1 with q = π_ref / π,
    Shao et al. 2024, equation 4 (k3 of Schulman 2020, "Approximating KL Divergence")."""
    logs = reference - policy
    return logs.exp() - logs - 1


def averaged(values: Tensor, tokens: Tokens, mean: Mean, longest: int) -> Tensor:
    """Returns the sum (scalar) that, divided by the number of answers, or of tokens for `tokens`, is the mean."""
    match mean:
        case "answers":
            return (values / tokens.lengths.clamp(min=1)[tokens.owner]).sum()
        case "longest":
            return values.sum() / longest
    return values.sum()
