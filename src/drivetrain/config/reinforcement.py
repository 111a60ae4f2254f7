"""Learning from rewards for the model's own answers, as data: the losses, the rewards, and which settings go
together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from drivetrain.config.adapter import Adapter
from drivetrain.config.base import Frozen, PathOrId, decides_memory, doc
from drivetrain.config.generation import Generation
from drivetrain.config.models_of_runs import name_of
from drivetrain.config.near_names import suggestion
from drivetrain.config.reference import ReferenceBlock, reference_problems
from drivetrain.config.rollout_server import RolloutServer, as_server, server_problems
from drivetrain.errors import Problem

FIELD = "workload.reinforcement"
GRPO, RLOO, PPO = "grpo", "rloo", "ppo"
STAGES = (GRPO, RLOO, PPO)
VERIFIERS = ("exact_match", "regex", "math", "code", "length")  # functions of drivetrain.rewards.verifiers
PACKAGES = {"math": "math_verify"}  # verifier -> the optional package that it needs

LossName = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo", "rloo", "ppo"]
# the mean over the global batch: of each answer's mean over its tokens; over all tokens; of each answer's sum, divided
# by the longest answer allowed; of each answer's sum
Mean = Literal["answers", "tokens", "longest", "sums"]


@dataclass(frozen=True)
class PolicyLossRow:
    """A loss of answers with advantages. Its formula is the function of the same name in
    drivetrain.workloads.policy_losses.

    takes: the settings that it reads, beside `beta`. importance: the levels of its ratio. scale: what usually divides
    the advantages.
    """

    mean: Mean
    takes: tuple[str, ...] = ("clip", "clip_high", "delta")
    stages: tuple[str, ...] = (GRPO,)
    importance: tuple[str, ...] = ("token", "sequence")
    scale: Literal["group", "batch", "none"] = "group"


OF_VALUES = ("gamma", "gae_lambda", "value_weight", "value_clip")
LOSSES: dict[str, PolicyLossRow] = {
    "grpo": PolicyLossRow("answers"),
    "dr_grpo": PolicyLossRow("longest", scale="none"),
    "dapo": PolicyLossRow("tokens"),
    "bnpo": PolicyLossRow("tokens"),
    "cispo": PolicyLossRow("tokens", ("clip_high",)),
    "sapo": PolicyLossRow("answers", ("temperatures",)),
    "luspo": PolicyLossRow("sums", importance=("sequence",)),
    "vespo": PolicyLossRow("tokens", ("shapes",), importance=("token",)),
    "rloo": PolicyLossRow("answers", ("clip", "clip_high"), (RLOO,), ("sequence",), "none"),
    "ppo": PolicyLossRow("tokens", ("clip", "clip_high", *OF_VALUES), (PPO,), ("token",), "none"),
}
OF_SOME = ("clip", "clip_high", "delta", "temperatures", "shapes", *OF_VALUES)
USUAL_ANSWERS = {PPO: 1}  # to each prompt; elsewhere 8
LARGEST_RATIO = 5.0  # of cispo: Khatri et al. 2025, "The Art of Scaling Reinforcement Learning Compute", section 4


Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
USUAL_LOSS: dict[str, LossName] = {GRPO: "grpo", RLOO: "rloo", PPO: "ppo"}


def _named(given: Any) -> Any:
    """Returns a reward's name. Raises an error with its remedy for a function itself."""
    if not callable(given):
        return given
    name = getattr(given, "__name__", "function")
    module = getattr(given, "__module__", None) or "__main__"
    there = "put it into a file such as my_rewards.py, and " if module == "__main__" else ""
    fix = f"{there}write it as module:function, '{'my_rewards' if there else module}:{name}'"
    why = "a reward is named, since it runs in processes of its own, which import it"
    raise PydanticCustomError("function", "{why}", {"why": why, "fix": fix})


class Reward(Frozen):
    """One reward for an answer. Several are added up."""

    use: Annotated[str | None, BeforeValidator(_named)] = doc(
        "exact_match, regex, math, code, length, or a function of your own as package.module:name (give it or model)",
        None,
    )
    model: PathOrId | None = doc(
        "A reward model: a folder of stage reward's, or of a Transformers sequence classifier with one label",
        None,
        json_schema_extra=decides_memory,
    )
    name: str | None = doc("Its name in reports; left out, that of the function, or of the folder", None)
    weight: float = doc("Its factor in the sum", 1.0)
    time_limit: float = doc("Seconds a call may take; then its process is ended, and the answer has none", 30, gt=0)
    processes: int = doc("Processes that compute it, on each rank", 1, gt=0)
    options: dict[str, Any] = doc("Further keyword arguments of the function: {pattern: ...} of regex", {})
    messages: bool = doc("A function of your own gets texts as lists of {role, content}", False)

    @property
    def label(self) -> str:
        if self.name is not None:
            return self.name
        return self.use.replace(":", ".").rpartition(".")[2] if self.use else name_of(self.model or "")

    @property
    def import_path(self) -> str | None:
        """The import path of a function that is the user's own."""
        return None if self.use is None or self.use in VERIFIERS else self.use


def _rewards(given: Any) -> Any:
    listed = given if isinstance(given, list) else [given]
    return [{"use": each} if isinstance(each, str) or callable(each) else each for each in listed]


class Reinforcement(ReferenceBlock):
    """grpo, rloo, ppo: answers of the model itself, their rewards, and the loss."""

    rewards: Annotated[list[Reward], BeforeValidator(_rewards)] = doc(
        "The rewards of an answer: names, blocks with more settings, or a list of them", []
    )
    loss: LossName | None = doc(
        "grpo: grpo (usual), dr_grpo, dapo, bnpo, cispo, sapo, luspo, vespo (docs/how-to/reinforcement-learning.md)",
        None,
    )
    answers: int | None = doc(
        "Answers to each prompt: the group; left out, 8; ppo: 1", None, gt=0, json_schema_extra=decides_memory
    )
    max_new_tokens: int = doc("Tokens of an answer, at most", 256, gt=0, json_schema_extra=decides_memory)
    temperature: float = doc("Temperature at which answers are drawn", 1.0, gt=0)
    updates: int = doc("Updates among which a batch of answers is divided", 1, gt=0)
    passes: int = doc("Times that each answer is learned from", 1, gt=0)
    importance: Literal["token", "sequence"] | None = doc(
        "Ratio to the model that answered: of each token, or of the whole answer (GSPO); left out, token, or the one "
        "that the loss has",
        None,
    )
    clip: float | None = doc("How far the ratio may fall below 1; left out, 0.2", None, gt=0, le=1)
    clip_high: float | None = doc(
        "How far it may rise above 1 (clip-higher); left out, as clip. cispo: the largest ratio, 5", None, gt=0
    )
    delta: float | None = doc("The largest ratio where advantages are negative too (two-sided clipping)", None, gt=1)
    beta: float = doc("Weight of the divergence from the reference; 0 needs no reference", 0.0, ge=0)
    kl_ratio: bool = doc("beta: multiply the divergence by the ratio, so that its gradient has no bias", False)
    scale: Literal["group", "batch", "none"] | None = doc(
        "What advantages are divided by: the group's standard deviation, the batch's, or nothing; left out, group; "
        "dr_grpo, rloo: none",
        None,
    )
    importance_cap: float | None = doc(
        "Weigh each token by the trainer's probability of it over the generator's, at most so much (truncated "
        "importance sampling); left out, tokens are not weighed",
        None,
        gt=0,
    )
    importance_floor: float | None = doc("The least such weight", None, gt=0)
    importance_correction: Correction | None = doc(
        "The weight of each token, or one of the whole answer; beyond the bounds it is the bound (truncate), or 0 "
        "(mask): token_truncate (usual), token_mask, sequence_truncate, sequence_mask",
        None,
    )
    temperatures: tuple[float, float] = doc(
        "sapo: temperatures of its gate, where advantages are positive, and elsewhere", (1.0, 1.05)
    )
    shapes: tuple[float, float, float, float] = doc(
        "vespo: k and lambda of its gamma weights where advantages are positive or 0, then where negative",
        (2.0, 3.0, 3.0, 2.0),
    )
    gamma: float = doc("ppo: discount of later rewards", 1.0, gt=0, le=1)
    gae_lambda: float = doc("ppo: decay of advantages (GAE)", 0.95, ge=0, le=1)
    value_weight: float = doc("ppo: weight of the value head's loss", 0.1, gt=0)
    value_clip: float = doc("ppo: how far a value may move from its estimate before", 0.2, gt=0)
    mask_truncated: bool = doc("Learn nothing from answers that reached max_new_tokens", False)
    server: Annotated[RolloutServer | None, BeforeValidator(as_server)] = doc(
        "A vLLM server that draws the answers which are learned from: its address, or a block", None
    )
    allow_code: bool = doc("Let the reward code run, isolated, the Python that the model writes", False)

    @property
    def named_functions(self) -> list[tuple[str, str]]:
        """(field of the run file, import path) of the rewards that are the user's own functions."""
        rewards = enumerate(self.rewards)
        return [(f"{FIELD}.rewards.{number}.use", path) for number, each in rewards if (path := each.import_path)]

    @property
    def packages(self) -> list[tuple[str, str, str]]:
        """(field of the run file, verifier, package that it needs) of the rewards that need an optional package."""
        uses = [(f"{FIELD}.rewards.{number}.use", each.use) for number, each in enumerate(self.rewards)]
        return [(field, f"the reward {use}", PACKAGES[use]) for field, use in uses if use in PACKAGES]

    def loss_of(self, stage: str) -> LossName:
        return self.loss or USUAL_LOSS[stage]

    def answers_of(self, stage: str) -> int:
        return self.answers or USUAL_ANSWERS.get(stage, 8)

    def importance_of(self, stage: str) -> str:
        return self.importance or LOSSES[self.loss_of(stage)].importance[0]

    def scale_of(self, stage: str) -> str:
        return self.scale or LOSSES[self.loss_of(stage)].scale

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest ratio of a clipped loss."""
        low = 0.2 if self.clip is None else self.clip
        return 1 - low, 1 + (low if self.clip_high is None else self.clip_high)

    @property
    def corrects(self) -> bool:
        """Whether tokens are weighed by the trainer's probability over the generator's."""
        return self.importance_cap is not None or self.importance_floor is not None

    @property
    def drawing(self) -> Generation:
        """How the answers that are learned from are drawn."""
        return Generation(max_new_tokens=self.max_new_tokens, temperature=self.temperature)

    def settled(self, adapters: Sequence[Adapter] | None) -> Self:
        """Returns the block with its reference chosen."""
        return self.with_reference(self.beta > 0, adapters)


def reinforcement_problems(block: Reinforcement, stage: str, adapters: Sequence[Adapter] | None) -> Iterator[Problem]:
    """Yields settings that do not go together, or that nothing reads."""
    if stage not in STAGES:
        for name in block.given:
            why = f"only stages that learn from rewards read it, and workload.stage is {stage}"
            yield Problem(f"{FIELD}.{name}", why, f"leave it out, or give one of {', '.join(STAGES)}")
        return
    yield from _settings(block, stage)
    yield from _of_rewards(block)
    if block.reference == "cached":
        why = "answers are new in each batch: nothing is known of them before"
        yield Problem(f"{FIELD}.reference", why, "give reference: copy")
    if block.reference in ("copy", "adapters_off") and not block.beta:
        yield Problem(f"{FIELD}.reference", "beta is 0: nothing is compared with it", "leave it out, or give beta")
    if block.reference == "none" and block.beta:
        yield Problem(f"{FIELD}.reference", "beta weighs the divergence from it", "leave it out, or give beta: 0")
    yield from reference_problems(block, FIELD, adapters)
    if block.server is not None:
        yield from server_problems(block.server, f"{FIELD}.server", adapters)


def _settings(block: Reinforcement, stage: str) -> Iterator[Problem]:
    loss, row = block.loss_of(stage), LOSSES[block.loss_of(stage)]
    if stage not in row.stages:
        known = [name for name, each in LOSSES.items() if stage in each.stages]
        why = f"{loss} is a loss of stage {' or '.join(row.stages)}"
        yield Problem(f"{FIELD}.loss", why, f"{stage} has {', '.join(known)}")
    for setting in OF_SOME:
        if setting in block.given and setting not in row.takes:
            able = [name for name, each in LOSSES.items() if stage in each.stages and setting in each.takes]
            fix = f"leave it out, or give one of {', '.join(able)}" if able else "leave it out"
            yield Problem(f"{FIELD}.{setting}", f"the loss {loss} has none", fix)
    if block.importance is not None and block.importance not in row.importance:
        why = f"the ratio of {loss} is of each {row.importance[0]}"
        yield Problem(f"{FIELD}.importance", why, "leave it out")
    yield from _of_correction(block, loss)
    if block.kl_ratio and (not block.beta or stage != GRPO):
        yield Problem(f"{FIELD}.kl_ratio", "no divergence is a term of the loss", "give stage: grpo and beta")
    if min(block.temperatures) <= 0:
        yield Problem(f"{FIELD}.temperatures", f"{list(block.temperatures)} must be above 0", "give two above 0")
    if block.answers_of(stage) < 2 and stage != PPO:
        why = "one answer has no others that it could be compared with"
        yield Problem(f"{FIELD}.answers", why, "give at least 2, or stage: ppo")
    if stage == PPO and block.scale is not None:
        yield Problem(f"{FIELD}.scale", "ppo's advantages are whitened over the whole batch", "leave it out")


def _of_correction(block: Reinforcement, loss: str) -> Iterator[Problem]:
    cap, floor = block.importance_cap, block.importance_floor
    if loss == "vespo":
        why = "vespo bounds the weight of a whole answer by a function of its own"
        for name in ("importance_cap", "importance_floor", "importance_correction"):
            if name in block.given:
                yield Problem(f"{FIELD}.{name}", why, "leave it out, or give another loss")
    elif block.importance_correction is not None and not block.corrects:
        why = "tokens are not weighed without a bound"
        yield Problem(f"{FIELD}.importance_correction", why, "give importance_cap: 2, or leave it out")
    if cap is not None and floor is not None and floor >= cap:
        why = f"the least weight, {floor:g}, is not below the largest, {cap:g}"
        yield Problem(f"{FIELD}.importance_floor", why, "give one below importance_cap")


def _of_rewards(block: Reinforcement) -> Iterator[Problem]:
    field = f"{FIELD}.rewards"
    if not block.rewards:
        fix = f"give one of {', '.join(VERIFIERS)}, a function as package.module:name, or {{model: runs/reward}}"
        yield Problem(field, "answers need a reward, and none is given", fix)
    runs_code = any(each.use == "code" for each in block.rewards)
    if runs_code and not block.allow_code:
        why = "the reward code runs Python that the model writes, isolated from this machine"
        yield Problem(f"{FIELD}.allow_code", why, "give allow_code: true if you want that")
    if block.allow_code and not runs_code:
        yield Problem(f"{FIELD}.allow_code", "no reward runs code", "leave it out, or give the reward code")
    labels = [each.label for each in block.rewards]
    for label in sorted({each for each in labels if labels.count(each) > 1}):
        yield Problem(f"{field}.name", f"two rewards are called {label}", "give each a name of its own")
    for number, each in enumerate(block.rewards):
        yield from _of_one(each, f"{field}.{number}")


def _of_one(reward: Reward, place: str) -> Iterator[Problem]:
    own = reward.import_path
    if (reward.use is None) == (reward.model is None):
        given = "neither was given" if reward.use is None else "both were given"
        yield Problem(place, f"of use and model {given}", "give one of them")
    if own is not None and ":" not in own and "." not in own:
        why = f"{own!r} is no reward that ships, and no import path"
        known = f"give one of {', '.join(VERIFIERS)}, or package.module:name"
        near = suggestion(own, VERIFIERS)
        yield Problem(f"{place}.use", why, f"{near} Else {known}" if near else known)
    if reward.messages and own is None:
        yield Problem(f"{place}.messages", "it is for functions of your own: others read texts", "leave it out")
    for name in ("time_limit", "processes", "options"):
        if reward.model is not None and getattr(reward, name) != Reward.model_fields[name].default:
            yield Problem(f"{place}.{name}", "a reward model runs on the run's own devices", "leave it out")
