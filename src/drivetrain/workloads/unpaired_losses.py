"""The losses of answers that are labelled one by one, each a function of the answers' log-ratios to the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from drivetrain.config.preference import Preference


def kto(ratios: Tensor, desirable: Tensor, kl: Tensor, beta: float) -> Tensor:
    """Ethayarajh et al. 2024, "KTO", equations 7 and 8: 1 - v, where the value v of an answer is measured from the
    reference point z0 = KL(π || π_ref).

    ratios: (B,) log π / π_ref; desirable: (B,) bool; kl: scalar, at least 0, without gradient. Returns (B,).
    """
    away = beta * (ratios - kl)
    return torch.sigmoid(torch.where(desirable, -away, away))


def apo_zero_unpaired(ratios: Tensor, desirable: Tensor, kl: Tensor, beta: float) -> Tensor:
    """D'Oosterlinck et al. 2024, "Anchored Preference Optimization", equation 7, of single answers: `kto` at z0 = 0."""
    return kto(ratios, desirable, torch.zeros_like(kl), beta)


FORMULAS: Mapping[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "kto": kto,
    "apo_zero_unpaired": apo_zero_unpaired,
}


def weights(desirable: Tensor, settings: Preference) -> Tensor:
    """Returns (B,): λ_D for desirable answers, λ_U for others."""
    return torch.where(desirable, settings.desirable_weight, settings.undesirable_weight)
