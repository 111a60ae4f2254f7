"""The stages of a language model's training as data: what is learned, from which samples, by which workload."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# texts; conversations; pairs of conversations that differ in their answer, one of which is preferred; conversations
# whose answer is labelled as desirable or not; answers marked step by step; prompts, with the reply in the data as
# reference
SampleKind = Literal["texts", "conversations", "pairs", "labelled", "steps", "prompts"]


@dataclass(frozen=True)
class Stage:
    """A stage of a language model's training.

    A new one is an entry of STAGES and, unless an existing workload trains it, a file in `drivetrain.workloads`.
    """

    name: str
    learns: str  # one line for the documentation of `stage`
    samples: SampleKind
    implementation: str = "drivetrain.workloads.language_model:LanguageModelWorkload"
    llama_factory: str | None = None  # its name in LLaMA-Factory's files
    auto_class: str = "AutoModelForCausalLM"  # the Transformers class that builds its model

    @property
    def has_conversations(self) -> bool:
        """Whether samples are made of conversations, whose replies are trained."""
        return self.samples != "texts"

    @property
    def has_preferences(self) -> bool:
        """Whether samples are answers that are compared or labelled."""
        return self.samples in ("pairs", "labelled", "steps")

    @property
    def has_rewards(self) -> bool:
        """Whether the model's own answers to prompts are rewarded."""
        return self.samples == "prompts"


POLICY = "drivetrain.workloads.policy:PolicyWorkload"
PREFERENCES = "drivetrain.workloads.preference:PreferenceWorkload"
StageName = Literal["pretrain", "sft", "distill", "dpo", "orpo", "simpo", "cpo", "kto", "reward", "grpo", "ppo", "rloo"]
STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("pretrain", "the next token of texts", samples="texts", llama_factory="pt"),
        Stage(
            "sft",
            "the replies of conversations (supervised fine-tuning)",
            samples="conversations",
            llama_factory="sft",
        ),
        Stage(
            "distill",
            "what a teacher, a frozen model, holds likely at each token of replies (knowledge distillation)",
            samples="conversations",
            implementation="drivetrain.workloads.distillation:DistillationWorkload",
        ),
        Stage(
            "dpo",
            "to prefer the chosen one of two answers (direct preference optimization)",
            samples="pairs",
            implementation=PREFERENCES,
            llama_factory="dpo",
        ),
        Stage(
            "orpo",
            "the chosen answer, at better odds than the rejected one (no reference)",
            samples="pairs",
            implementation=PREFERENCES,
        ),
        Stage(
            "simpo",
            "to make the chosen answer likelier a token than the rejected one, by a margin (no reference)",
            samples="pairs",
            implementation=PREFERENCES,
        ),
        Stage(
            "cpo",
            "the chosen answer, and to make it likelier than the rejected one (no reference)",
            samples="pairs",
            implementation=PREFERENCES,
        ),
        Stage(
            "kto",
            "answers that are labelled as desirable, away from those that are not",
            samples="labelled",
            implementation="drivetrain.workloads.unpaired:UnpairedWorkload",
            llama_factory="kto",
        ),
        Stage(
            "reward",
            "to score the chosen one of two answers above the other (a reward model)",
            samples="pairs",
            implementation="drivetrain.workloads.reward:RewardWorkload",
            llama_factory="rm",
            auto_class="AutoModelForSequenceClassification",
        ),
        Stage(
            "grpo",
            "from rewards for several answers of its own to each prompt, each against the group's mean",
            samples="prompts",
            implementation=POLICY,
        ),
        Stage(
            "ppo",
            "from rewards for its answers, each token against the estimate of a value head (PPO)",
            samples="prompts",
            implementation="drivetrain.workloads.ppo:PpoWorkload",
            llama_factory="ppo",
        ),
        Stage(
            "rloo",
            "from such rewards, each against the mean of the group's others (REINFORCE leave-one-out)",
            samples="prompts",
            implementation=POLICY,
        ),
    )
}
# forms of a stage that its settings choose
FORMS: dict[str, Stage] = {
    "likelihood": replace(
        STAGES["sft"], implementation="drivetrain.workloads.weighted_likelihood:WeightedLikelihoodWorkload"
    ),
    "own_answers": replace(STAGES["distill"], implementation="drivetrain.workloads.own_answers:OwnAnswersWorkload"),
    "steps": replace(
        STAGES["reward"],
        samples="steps",
        implementation="drivetrain.workloads.process_reward:ProcessRewardWorkload",
        auto_class="AutoModelForTokenClassification",
    ),
}
