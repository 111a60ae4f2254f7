"""The losses over pairs of answers, each a function of the answers' log-probabilities.

Notation: log-ratio log π(y|x) - log π_ref(y|x) of an answer; β `beta`; ε `label_smoothing`; σ the logistic function.
A function returns (P,) losses of P pairs, whose mean over the global batch is the loss. Losses that act on a batch take
it from `whole`, the values of all N pairs of the global batch, without gradient; the gradient that their own pairs get
is that of the loss over all N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from drivetrain.config.preference import LIKELIHOODS, Preference


@dataclass(frozen=True)
class Sides:
    """Values of P pairs, each (P, 2): of the chosen and the rejected answer. policy, reference: log-probabilities, the
    reference's 0 where there is none. tokens: how many of each answer's tokens are targets. full: the policy's
    log-probabilities without `ld_alpha`. weights: (P,), what the losses that compare answers are multiplied by; None:
    all by 1."""

    policy: Tensor
    reference: Tensor
    tokens: Tensor
    full: Tensor
    weights: Tensor | None = None

    @property
    def ratios(self) -> Tensor:
        return self.policy - self.reference

    @property
    def average(self) -> Tensor:
        """The policy's log-probability a token."""
        return self.policy / self.tokens


@dataclass(frozen=True)
class Whole:
    """policy, reference: of all pairs of the global batch, (N, 2). own: (P,) int64, where the P pairs are."""

    policy: Tensor
    reference: Tensor
    own: Tensor

    @property
    def ratios(self) -> Tensor:
        return self.policy - self.reference


@dataclass(frozen=True)
class Case:
    """The arguments of a loss."""

    sides: Sides
    whole: Whole
    settings: Preference
    beta: float

    @property
    def scores(self) -> Tensor:
        """(P, 2): f'(π / π_ref) of each answer up to a constant, by the divergence f that is regularised: Wang et al.
        2023, "Beyond Reverse KL" (f-DPO), table 1; reverse KL has the log-ratio itself, the others' exponents are
        bounded so that they stay finite in fp32."""
        ratios = self.sides.ratios
        match self.settings.divergence:
            case "forward_kl":
                return 1 - torch.exp((-ratios).clamp(max=80.0))
            case "js":
                return math.log(2) + F.logsigmoid(ratios)
            case "alpha":
                less = self.settings.divergence_alpha - 1.0
                return ratios if abs(less) < 1e-6 else (torch.exp((less * ratios).clamp(max=80.0)) - 1.0) / less
        return ratios

    @property
    def logits(self) -> Tensor:
        """(P,): β times how much further the chosen answer's score is than the rejected one's."""
        return self.beta * between(self.scores)


def loss_of(name: str, case: Case) -> Tensor:
    """Returns the sum of a loss over the P pairs."""
    values, weights = FORMULAS[name](case), case.sides.weights
    return (values if weights is None or name in LIKELIHOODS else values * weights).sum()


def between(values: Tensor) -> Tensor:
    """Returns (P,): the chosen side's values less the rejected side's."""
    return values[:, 0] - values[:, 1]


def smoothed(logits: Tensor, smoothing: float) -> Tensor:
    """Returns -(1 - ε) log σ(z) - ε log σ(-z)."""
    loss = -F.logsigmoid(logits)
    return loss if not smoothing else (1 - smoothing) * loss - smoothing * F.logsigmoid(-logits)


# --- of the difference of two scores ----------------------------------------------------------------------------------


def sigmoid(case: Case) -> Tensor:
    """Rafailov et al. 2023, "Direct Preference Optimization", equation 7; with label_smoothing cDPO (Mitchell 2023, "A
    note on DPO with noisy preferences", equation 3)."""
    return smoothed(case.logits, case.settings.label_smoothing)


def hinge(case: Case) -> Tensor:
    """Zhao et al. 2023, "SLiC-HF", equation 1, with DPO's scores: max(0, 1 - z)."""
    return F.relu(1 - case.logits)


def ipo(case: Case) -> Tensor:
    """Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human Preferences", equation 17,
    of scores a token, as its authors computed: (h - 1 / (2 β))²."""
    return (between(case.scores / case.sides.tokens) - 1 / (2 * case.beta)).square()


def exo_pair(case: Case) -> Tensor:
    """Ji et al. 2024, "Towards Efficient Exact Optimization of Language Model Alignment" (EXO), equation 16: reverse KL
    from (1 - ε, ε) to softmax over both answers."""
    logits, share = case.logits, case.settings.label_smoothing
    chosen = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-share))
    return chosen + torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(share))


def robust(case: Case) -> Tensor:
    """Chowdhury et al. 2024, "Provably Robust DPO", equation 12: unbiased where a share ε of the labels is swapped."""
    share, logits = case.settings.label_smoothing, case.logits
    return (share * F.logsigmoid(-logits) - (1 - share) * F.logsigmoid(logits)) / (1 - 2 * share)


def discopop(case: Case) -> Tensor:
    """Lu et al. 2024, "Discovering Preference Optimization Algorithms with and for Large Language Models", equation 5:
    log-ratio modulated between logistic and exponential loss."""
    logits = case.logits
    mixed = torch.sigmoid(logits / case.settings.discopop_tau)
    return (1 - mixed) * -F.logsigmoid(logits) + mixed * torch.exp(-logits)


def sigmoid_norm(case: Case) -> Tensor:
    """DPO with scores a token: Lambert et al. 2024, "Tulu 3", equation 6 (length-normalised DPO)."""
    return -F.logsigmoid(case.beta * between(case.scores / case.sides.tokens))


# --- of each answer's log-ratio ---------------------------------------------------------------------------------------


def nca_pair(case: Case) -> Tensor:
    """Chen et al. 2024, "Noise Contrastive Alignment of Language Models with Explicit Rewards", equation 11, K = 2."""
    chosen, rejected = (case.beta * case.sides.ratios).unbind(1)
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def sppo_hard(case: Case) -> Tensor:
    """Wu et al. 2024, "Self-Play Preference Optimization", equation 4.7 with preferences of 1 and 0."""
    chosen, rejected = case.sides.ratios.unbind(1)
    return (chosen - 0.5 / case.beta).square() + (rejected + 0.5 / case.beta).square()


def apo_zero(case: Case) -> Tensor:
    """D'Oosterlinck et al. 2024, "Anchored Preference Optimization", equation 7: more of the chosen answer, less of the
    rejected one."""
    chosen, rejected = (case.beta * case.sides.ratios).unbind(1)
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def apo_down(case: Case) -> Tensor:
    """The same, equation 8: less of both, of the rejected answer most."""
    chosen, rejected = (case.beta * case.sides.ratios).unbind(1)
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


# --- of the whole global batch ----------------------------------------------------------------------------------------


def bco_pair(case: Case) -> Tensor:
    """Jung et al. 2024, "Binary Classifier Optimization for Large Language Model Alignment", equation 10. The reward
    shift δ is the mean reward of the global batch: their moving average would depend on where a run was resumed."""
    shift = case.beta * case.whole.ratios.mean()
    chosen, rejected = (case.beta * case.sides.ratios - shift).unbind(1)
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def kto_pair(case: Case) -> Tensor:
    """Ethayarajh et al. 2024, "KTO", equation 8, of pairs: the mean of a desirable and an undesirable answer's loss.
    Each one's reference point is the KL estimate of the other side, not below 0, without gradient."""
    chosen, rejected = case.sides.ratios.unbind(1)
    of_chosen, of_rejected = case.whole.ratios.mean(0).clamp(min=0)
    desirable = torch.sigmoid(case.beta * (of_rejected - chosen))
    return (desirable + torch.sigmoid(case.beta * (rejected - of_chosen))) / 2


def aot(case: Case) -> Tensor:
    """Melnyk et al. 2024, "Distributional Preference Alignment of LLMs via Optimal Transport", algorithm 1, paired: the
    policy's margins, sorted, against the reference's, sorted."""
    margins, references = between(case.whole.policy), between(case.whole.reference).sort().values
    met = references[_places(margins)[case.whole.own]]
    return smoothed(case.beta * (between(case.sides.policy) - met), case.settings.label_smoothing)


def aot_unpaired(case: Case) -> Tensor:
    """The same, unpaired: the chosen answers' log-ratios, sorted, against the rejected ones', sorted.

    A pair's own two values meet values of other pairs, which are constants here: each meeting is counted half on
    either side, and its gradient in full.
    """
    whole, own = case.whole.ratios, case.whole.own
    (all_chosen, all_rejected), (chosen, rejected) = whole.unbind(1), case.sides.ratios.unbind(1)
    against = all_rejected.sort().values[_places(all_chosen)[own]]
    ahead = all_chosen.sort().values[_places(all_rejected)[own]]
    share = case.settings.label_smoothing
    both = smoothed(case.beta * (chosen - against), share) + smoothed(case.beta * (ahead - rejected), share)
    return both - both.detach() / 2


def _places(values: Tensor) -> Tensor:
    """Returns the place of each value among all, sorted: (N,) int64."""
    return values.argsort(stable=True).argsort()


# --- without a reference ----------------------------------------------------------------------------------------------


def nll(case: Case) -> Tensor:
    """The chosen answer's negative log-likelihood a token: Pang et al. 2024, "Iterative Reasoning Preference
    Optimization", equation 1, second term."""
    return -case.sides.full[:, 0] / case.sides.tokens[:, 0]


def sft(case: Case) -> Tensor:
    """The chosen answer's negative log-likelihood, which is divided by the tokens of all chosen answers."""
    return -case.sides.full[:, 0]


def orpo(case: Case) -> Tensor:
    """Hong et al. 2024, "ORPO", equations 6 and 7: the chosen answer's loss a token, and β times the odds ratio's."""
    average = case.sides.average
    odds = between(average) - between(torch.log(-torch.expm1(average.clamp(max=-1e-7))))
    return -average[:, 0] - case.beta * F.logsigmoid(odds)


def simpo(case: Case) -> Tensor:
    """Meng et al. 2024, "SimPO", equation 6: rewards are β times the log-probability a token, `gamma` apart."""
    return smoothed(case.beta * between(case.sides.average) - case.settings.gamma, case.settings.label_smoothing)


def cpo(case: Case) -> Tensor:
    """Xu et al. 2024, "Contrastive Preference Optimization", equation 3; its likelihood term is `sft`."""
    return smoothed(case.beta * between(case.sides.policy), case.settings.label_smoothing)


FORMULAS: Mapping[str, Callable[[Case], Tensor]] = {
    formula.__name__: formula
    for formula in (
        *(sigmoid, hinge, ipo, exo_pair, robust, discopop, sigmoid_norm, nca_pair, sppo_hard, apo_zero, apo_down),
        *(bco_pair, kto_pair, aot, aot_unpaired, nll, sft, orpo, simpo, cpo),
    )
} | {"cdpo": sigmoid}
