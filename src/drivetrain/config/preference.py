"""Learning from pairs of answers, as data: the losses, what each reads, and which settings go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from drivetrain.config.adapter import Adapter
from drivetrain.config.base import MaybeEmpty, doc
from drivetrain.config.reference import ReferenceBlock, reference_problems
from drivetrain.errors import Problem

FIELD = "workload.preference"
DPO, ORPO, SIMPO, CPO = "dpo", "orpo", "simpo", "cpo"
KTO = "kto"
PAIR_STAGES = (DPO, ORPO, SIMPO, CPO)
REWARD, STEPS = "reward", "steps"
STAGES = (*PAIR_STAGES, KTO, REWARD)

LossName = Literal[
    "sigmoid", "cdpo", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sigmoid_norm", "kto_pair", "sft", "nll", "orpo", "simpo", "cpo", "kto",
    "apo_zero_unpaired", "bradley_terry", "steps",
]  # fmt: skip


@dataclass(frozen=True)
class LossRow:
    """A loss over pairs, or over labelled answers. Its formula is the function of the same name in
    drivetrain.workloads.preference_losses, unpaired_losses, reward or process_reward.

    takes: settings that it reads. reference: whether it compares with the reference; "optional": it also works with
    a uniform one. smoothed: whether label_smoothing must be above 0. whole_batch: whether it needs a statistic of the
    whole global batch. by_tokens: whether it is divided by the chosen answers' tokens instead of pairs. sorts: whether
    it pairs answers anew, by their rewards.
    """

    takes: tuple[str, ...] = ("beta",)
    stages: tuple[str, ...] = (DPO,)
    reference: bool | Literal["optional"] = True
    smoothed: bool = False
    whole_batch: bool = False
    by_tokens: bool = False
    sorts: bool = False

    @property
    def is_of_pairs(self) -> bool:
        """Whether it is a loss of dpo with one value a pair: those that sort answers compare other pairs' answers."""
        return self.stages == (DPO,) and not self.sorts

    @property
    def settings(self) -> tuple[str, ...]:
        """Returns the settings that it reads."""
        return (*self.takes, "likelihood_weights") if self.is_of_pairs else self.takes


OF_SCORES = ("beta", "divergence")  # losses of the difference of two scores, which a divergence makes of the ratios
LOSSES: dict[str, LossRow] = {
    "sigmoid": LossRow((*OF_SCORES, "label_smoothing"), reference="optional"),
    "cdpo": LossRow((*OF_SCORES, "label_smoothing"), reference="optional", smoothed=True),
    "hinge": LossRow(OF_SCORES, reference="optional"),
    "ipo": LossRow(OF_SCORES, reference="optional"),
    "exo_pair": LossRow((*OF_SCORES, "label_smoothing"), reference="optional", smoothed=True),
    "nca_pair": LossRow(),
    "robust": LossRow((*OF_SCORES, "label_smoothing"), reference="optional", smoothed=True),
    "bco_pair": LossRow(whole_batch=True),
    "sppo_hard": LossRow(),
    "aot": LossRow(("beta", "label_smoothing"), whole_batch=True, sorts=True),
    "aot_unpaired": LossRow(("beta", "label_smoothing"), whole_batch=True, sorts=True),
    "apo_zero": LossRow(),
    "apo_down": LossRow(),
    "discopop": LossRow((*OF_SCORES, "discopop_tau"), reference="optional"),
    "sigmoid_norm": LossRow(OF_SCORES, reference="optional"),
    "kto_pair": LossRow(whole_batch=True),
    "sft": LossRow((), PAIR_STAGES, reference=False, by_tokens=True),
    "nll": LossRow((), PAIR_STAGES, reference=False),
    "orpo": LossRow(stages=(ORPO,), reference=False),
    "simpo": LossRow(("beta", "gamma", "label_smoothing"), (SIMPO,), reference=False),
    "cpo": LossRow(("beta", "label_smoothing"), (CPO,), reference=False),
    "kto": LossRow(("beta", "desirable_weight", "undesirable_weight"), (KTO,), whole_batch=True),
    "bradley_terry": LossRow(("centring",), (REWARD,), reference=False),
    "steps": LossRow(("step_separator",), (REWARD,), reference=False),
    "apo_zero_unpaired": LossRow(("beta", "desirable_weight", "undesirable_weight"), (KTO,)),
}
OF_SOME = (
    *("beta", "label_smoothing", "divergence", "discopop_tau", "gamma", "desirable_weight", "undesirable_weight"),
    *("centring", "step_separator", "likelihood_weights"),
)
LIKELIHOODS = ("sft", "nll")  # of the chosen answer alone: they go with every setting of the others
USUAL: dict[str, dict[str, float]] = {
    DPO: {"sigmoid": 1.0},
    ORPO: {"orpo": 1.0},
    SIMPO: {"simpo": 1.0},
    CPO: {"cpo": 1.0, "sft": 1.0},
    KTO: {"kto": 1.0},
    REWARD: {"bradley_terry": 1.0},
}
USUAL_BETA = {SIMPO: 2.0}  # Meng et al. 2024, section 3: 2.0 to 2.5; elsewhere 0.1


def _weighted(given: Any) -> Any:
    """Returns a mapping for a loss's name, or for a list of names. Raises an error with its remedy for the name of the
    stage dpo."""
    named = [given] if isinstance(given, str) else given
    if isinstance(named, list | dict) and any(isinstance(each, str) and each.lower() == DPO for each in named):
        why = "dpo is the name of a stage, and of no loss"
        fix = "DPO's own loss is called sigmoid: write sigmoid, or leave it out at stage dpo"
        raise PydanticCustomError("stage", "{why}", {"why": why, "fix": fix})
    return dict.fromkeys(named, 1.0) if isinstance(named, list) else named


Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Mixture = Annotated[dict[LossName, Weight], BeforeValidator(_weighted), Field(min_length=1)]


class Preference(ReferenceBlock):
    loss: Mixture | None = doc(
        "The loss, or a mixture {sigmoid: 1, nll: 0.2}. dpo: sigmoid (usual), hinge, ipo, robust, ...; sft and nll add "
        "the chosen answers' own loss. reward: bradley_terry (usual), or steps for answers marked step by step "
        "(docs/how-to/preferences.md)",
        None,
    )
    beta: float | None = doc(
        "How strongly answers are held to the reference, or rewards scaled; left out, 0.1; simpo: 2", None, gt=0
    )
    label_smoothing: float = doc("Share of labels that are taken to be swapped", 0.0, ge=0, lt=0.5)
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = doc(
        "dpo: divergence from the reference that is regularised (f-DPO)", "reverse_kl"
    )
    divergence_alpha: float = doc("divergence alpha: its coefficient", 0.5)
    discopop_tau: float = doc("discopop: temperature of its blending", 0.05, gt=0)
    gamma: float = doc("simpo: margin between the sides' rewards that is aimed at", 0.5, ge=0)
    centring: float = doc("reward: weight of a term that keeps the sum of both scores near 0", 0.0, ge=0)
    step_separator: MaybeEmpty = doc("loss steps: the text behind each step, whose last token is judged", "\n")
    desirable_weight: float = doc("kto: weight of desirable answers", 1.0, gt=0)
    undesirable_weight: float = doc("kto: weight of undesirable answers", 1.0, gt=0)
    ld_alpha: float | None = doc(
        "dpo: weight of an answer's tokens beyond the shorter answer's length (LD-DPO); left out, 1", None, ge=0, le=1
    )

    likelihood_weights: bool = doc(
        "dpo: weigh each pair by how likely the model itself is to give both answers (WPO)", False
    )

    def losses(self, stage: str) -> Mapping[str, float]:
        """Returns name → weight."""
        return USUAL[stage] if self.loss is None else {str(name): weight for name, weight in self.loss.items()}

    def reads_others(self, stage: str) -> bool:
        """Returns whether the reference reads each prompt before the step with its answer and with another one."""
        return stage == KTO and self.reference != "cached" and any(LOSSES[n].whole_batch for n in self.losses(stage))

    @property
    def reads_steps(self) -> bool:
        """Whether answers are learned from that are marked step by step."""
        return self.loss is not None and STEPS in self.loss

    def beta_of(self, stage: str) -> float:
        return self.beta if self.beta is not None else USUAL_BETA.get(stage, 0.1)

    def settled(self, stage: str, adapters: Sequence[Adapter] | None) -> Preference:
        """Returns the block with its reference chosen."""
        return self.with_reference(any(LOSSES[name].reference for name in self.losses(stage)), adapters)


def reads_margins(stage: str) -> bool:
    """Returns whether a stage's loss reads by how much the chosen answer of a pair is better."""
    return stage == REWARD


def preference_problems(block: Preference, stage: str, adapters: Sequence[Adapter] | None) -> Iterator[Problem]:
    """Yields settings that do not go together, or that nothing reads."""
    if stage not in STAGES:
        for name in block.given:
            why = f"only stages that learn from preferences read it, and workload.stage is {stage}"
            yield Problem(f"{FIELD}.{name}", why, f"leave it out, or give one of {', '.join(STAGES)}")
        return
    losses = block.losses(stage)
    for name in losses:
        if stage not in LOSSES[name].stages:
            known = [each for each, row in LOSSES.items() if stage in row.stages]
            where = " or ".join(LOSSES[name].stages)
            yield Problem(f"{FIELD}.loss", f"{name} is a loss of stage {where}", f"{stage} has {', '.join(known)}")
    main = [name for name in losses if name not in LIKELIHOODS]
    if not main:
        fix = "add one that compares the answers, or give workload.stage: sft"
        yield Problem(f"{FIELD}.loss", f"{' and '.join(losses)} learns from the chosen answers alone", fix)
    if block.reads_steps and len(losses) > 1:
        why = f"{STEPS} reads answers that are marked step by step, and {' and '.join({*losses} - {STEPS})} does not"
        yield Problem(f"{FIELD}.loss", why, "give one of them alone")
    yield from _settings(block, stage, main)
    yield from _reference(block, main, adapters)


def _settings(block: Preference, stage: str, main: Sequence[str]) -> Iterator[Problem]:
    given = set(block.given)
    for setting in OF_SOME:
        lacking = [name for name in main if setting not in LOSSES[name].settings]
        if setting in given and lacking:
            able = [name for name, row in LOSSES.items() if stage in row.stages and setting in row.settings]
            fix = f"leave it out, or give one of {', '.join(able)}" if able else "leave it out"
            yield Problem(f"{FIELD}.{setting}", f"the loss {' and '.join(lacking)} has none", fix)
    for name in main:
        if LOSSES[name].smoothed and not block.label_smoothing:
            why = f"{name} needs the share of labels that are wrong, above 0"
            yield Problem(f"{FIELD}.label_smoothing", why, "give it, such as 0.1")
    if "divergence_alpha" in given and block.divergence != "alpha":
        yield Problem(f"{FIELD}.divergence_alpha", f"the divergence is {block.divergence}", "give divergence: alpha")
    if block.ld_alpha is not None and stage != DPO:
        yield Problem(f"{FIELD}.ld_alpha", f"stage {stage} has no such weight", "leave it out, or give stage: dpo")


def _reference(block: Preference, main: Sequence[str], adapters: Sequence[Adapter] | None) -> Iterator[Problem]:
    needs = [name for name in main if LOSSES[name].reference is True]
    field = f"{FIELD}.reference"
    if block.reference == "none" and needs:
        why = f"{' and '.join(needs)} measures each answer against the reference"
        able = [name for name, row in LOSSES.items() if row.reference == "optional"]
        yield Problem(field, why, f"leave it out, or give one of {', '.join(able)}")
    if block.reference in ("copy", "cached", "adapters_off") and not any(LOSSES[name].reference for name in main):
        yield Problem(field, f"{' and '.join(main)} has no reference", "leave it out")
    yield from reference_problems(block, FIELD, adapters)
