"""The language-model workload: its stage, its model and its data, and what does not go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from drivetrain.config.bad_rows import BadRows
from drivetrain.config.base import doc
from drivetrain.config.data_paths import looks_like_hub_id, missing
from drivetrain.config.distillation import DISTILL, TEACHER, Distillation, distillation_problems
from drivetrain.config.fine_tuning import OF_DISTRIBUTIONS, PLAIN, SFT, FineTuning, fine_tuning_problems
from drivetrain.config.generation import Generation
from drivetrain.config.language_data import LanguageData
from drivetrain.config.language_model import LanguageModelModel, expansion_problems
from drivetrain.config.language_stages import FORMS, STAGES, SampleKind, Stage, StageName
from drivetrain.config.machine import Machine
from drivetrain.config.model_files import beyond_context, lacks_template
from drivetrain.config.preference import REWARD, Preference, preference_problems
from drivetrain.config.reference import OtherModelBlock, ReferenceBlock
from drivetrain.config.reinforcement import PPO, Reinforcement, reinforcement_problems
from drivetrain.config.workload_block import WorkloadBlock
from drivetrain.errors import Problem

if TYPE_CHECKING:
    from drivetrain.config.run import RunConfig

CAUSAL = "AutoModelForCausalLM"


class LanguageModel(WorkloadBlock):
    ACCOUNTS: ClassVar[str] = "drivetrain.workloads.language_report:accounts_without_samples"
    MADE_DATA: ClassVar[str] = "drivetrain.workloads.made_data:language"
    STREAMED: ClassVar[Sequence[str]] = ("workload.data.train.path", "workload.data.evaluation.path")
    type: Literal["language_model"] = doc("Task", "language_model")
    stage: StageName = doc("; ".join(f"{stage.name}: {stage.learns}" for stage in STAGES.values()), "pretrain")
    model: LanguageModelModel = doc("Model to train")
    data: LanguageData = doc("Texts or conversations")
    sft: FineTuning = doc("sft: the loss of a token", FineTuning())
    distillation: Distillation = doc("distill: the teacher, and the divergence from it", Distillation())
    preference: Preference = doc("dpo, orpo, simpo, cpo, kto, reward: the loss over preferences", Preference())
    reinforcement: Reinforcement = doc("grpo, rloo, ppo: answers, their rewards and the loss", Reinforcement())
    generate: Generation | None = doc("Let the model answer prompts at each evaluation; {} asks four", None)

    @property
    def template_owner(self) -> str | None:
        needs = self.has_conversations and self.data.template is None
        return self.model.tokenizer or self.model.path if needs else None

    @property
    def _form(self) -> Stage:
        """The stage, in the form that its loss chooses."""
        if self.stage == SFT and self.sft.loss != PLAIN:
            return FORMS["likelihood"]
        if self.stage == DISTILL and self.distillation.own_answers:
            return FORMS["own_answers"]
        return FORMS["steps"] if self.stage == REWARD and self.preference.reads_steps else STAGES[self.stage]

    @property
    def implementation(self) -> str:
        return self._form.implementation

    @property
    def auto_class(self) -> str:
        return self._form.auto_class

    @property
    def has_conversations(self) -> bool:
        """Whether samples are conversations, whose replies are trained."""
        return self._form.has_conversations

    @property
    def samples(self) -> SampleKind:
        return self._form.samples

    @property
    def has_preferences(self) -> bool:
        """Whether samples are answers that are compared or labelled."""
        return self._form.has_preferences

    @property
    def answers_prompts(self) -> bool:
        return self.generate is not None

    @property
    def has_rewards(self) -> bool:
        """Whether the model's own answers to prompts are rewarded."""
        return self._form.has_rewards

    @property
    def held_to(self) -> ReferenceBlock:
        """The settings of the reference that the stage compares with."""
        if self.stage == SFT:
            return self.sft
        return self.reinforcement if self.has_rewards else self.preference

    @property
    def models_beside(self) -> Mapping[str, OtherModelBlock]:
        """Returns the blocks of other models that the stage reads, by their fields."""
        if self.stage == DISTILL:
            return {TEACHER: self.distillation.teacher}
        return {f"{self.held_to_field}.reference_model": self.held_to.reference_model}

    @property
    def held_to_field(self) -> str:
        return f"workload.{'sft' if self.stage == SFT else 'reinforcement' if self.has_rewards else 'preference'}"

    @property
    def named_functions(self) -> Sequence[tuple[str, str]]:
        return self.reinforcement.named_functions

    @property
    def packages(self) -> Sequence[tuple[str, str, str]]:
        return self.reinforcement.packages

    @property
    def runs_answers(self) -> bool:
        return self.has_rewards and self.reinforcement.allow_code

    # --- the model ----------------------------------------------------------------------------------------------------

    @property
    def described_model(self) -> LanguageModelModel:
        return self.model

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        return self.model.rope_scaling

    @property
    def has_tokenizer(self) -> bool:
        return True

    # --- the data -----------------------------------------------------------------------------------------------------

    @property
    def sources(self) -> Sequence[tuple[str, str]]:
        given = (("train", self.data.train), ("evaluation", self.data.evaluation or []))
        return [(source.path, f"workload.data.{name}") for name, sources in given for source in sources]

    @property
    def has_evaluation_data(self) -> bool:
        return self.data.evaluation is not None

    @property
    def registry(self) -> Path | None:
        return self.data.registry

    @property
    def digested(self) -> Literal["rows"]:
        return "rows"

    @property
    def cache_folder(self) -> Path | None:
        return self.data.cache

    @property
    def accepted_bad_rows(self) -> BadRows:
        return self.data.bad_rows

    @property
    def refuses_long_samples(self) -> bool:
        return self.data.too_long == "error"

    def lenient(self) -> Self:
        return self._with_data(bad_rows=1.0, too_long="drop" if self.refuses_long_samples else self.data.too_long)

    def strict(self) -> Self:
        return self._with_data(bad_rows="error")

    def _with_data(self, **update: Any) -> Self:
        return self.model_copy(update={"data": self.data.model_copy(update=update)})

    # --- its samples and its loss -------------------------------------------------------------------------------------

    @property
    def is_packed(self) -> bool:
        return self.has_conversations and self.data.packing

    @property
    def has_alternatives(self) -> bool:
        """Whether a training reads several answers to a prompt together."""
        return self.samples in ("pairs", "prompts") or self.preference.reads_others(self.stage)

    @property
    def longest(self) -> int:
        """The most tokens of a sample, answers that the model makes included."""
        return self.data.length + (self.reinforcement.max_new_tokens if self.has_rewards else 0)

    @property
    def fixed_rows(self) -> bool | Literal["auto"]:
        return False if self.has_preferences or self.makes_samples else self.data.fixed_rows

    @property
    def lengths_vary(self) -> bool:
        return True

    @property
    def makes_samples(self) -> bool:
        return self.has_rewards or (self.stage == DISTILL and self.distillation.own_answers > 0)

    @property
    def samples_made(self) -> float:
        return self.reinforcement.answers_of(self.stage) / self.reinforcement.updates if self.has_rewards else 1

    @property
    def may_fuse_loss(self) -> bool:
        return self.model.fused_loss is not False and not self._compares_distributions

    @property
    def _compares_distributions(self) -> bool:
        """Whether the loss reads more of a distribution over the tokens than the target's probability."""
        if self.stage == SFT:
            return self.sft.loss in OF_DISTRIBUTIONS
        return self.stage == DISTILL or (self.has_preferences and self.preference.likelihood_weights)

    # --- what it cannot do, and what a run file leaves to it ----------------------------------------------------------

    def file_problems(self) -> Iterator[Problem]:
        yield from super().file_problems()
        own_code = self.model.trust_tokenizer_code or self.model.trust_remote_code  # which may hold the template
        if (owner := self.template_owner) is not None and not own_code and lacks_template(Path(owner).expanduser()):
            fix = "give one of alpaca, vicuna, chatml, plain, or the path of a .jinja file"
            yield Problem("workload.data.template", "the tokenizer has no chat template", fix)

    def context_problems(self, places: int | None) -> Iterator[Problem]:
        if self.model.rope_scaling is None:
            field, fix = "workload.data.length", "shorten it, or give workload.model.rope_scaling"
            yield from beyond_context(places, self.data.length, field, fix)

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        yield from super().problems(run)
        if self.data.stream and self.data.documents not in ("file", "line"):
            why = "of text files that are streamed each line is a text"
            yield Problem("workload.data.documents", why, "leave it out, or give stream: false")
        if self.data.stream and (self.has_preferences or self.makes_samples):
            yield Problem("workload.data.stream", f"stage {self.stage} reads its data whole", "leave it out")
        if self.held_to.reference == "cached" and run.engine.single_pass_axis is not None:
            axis = run.engine.single_pass_axis
            why = f"{axis} ranks run no pass of the whole model before the training"
            yield Problem(f"engine.{axis}", why, f"leave {axis} out, or give reference: none")
        yield from fine_tuning_problems(self.sft, self.stage, run.adapter)
        yield from distillation_problems(self.distillation, self.stage, run.adapter)
        yield from preference_problems(self.preference, self.stage, run.adapter)
        yield from reinforcement_problems(self.reinforcement, self.stage, run.adapter)
        yield from self._split_problems(run)
        yield from expansion_problems(self.model, self.stage, self.auto_class == CAUSAL)
        if self.stage == PPO and run.engine.splits_the_head:
            why = "ppo's value head reads hidden states that no rank has as a whole"
            yield Problem("engine.tp", why, "leave tp out, or give stage: grpo")
        if self.generate is not None and self.auto_class != CAUSAL:
            yield Problem("workload.generate", "a model that scores answers makes none", "leave it out")

    def _split_problems(self, run: RunConfig) -> Iterator[Problem]:
        """Yields a model beside the trained one that tensor ranks would compute with other roundings than one rank
        does."""
        for field, other in self.models_beside.items():
            if other.precision not in (None, "fp32") and run.engine.splits_the_head:
                why = "the trial step compares split layers with whole ones, and 16 bits of another model blur it"
                yield Problem(f"{field}.precision", why, "leave it or tp out")

    def adapter_problems(self) -> Iterator[Problem]:
        yield from super().adapter_problems()
        for name in ("train_last_blocks", "add_blocks"):
            if getattr(self.model, name) is not None:
                yield Problem(f"workload.model.{name}", "adapters freeze all blocks", "leave it or adapter out")
        if self.model.resize_vocabulary:
            why = "the new rows of the embedding would be of no base that the adapter could be loaded on"
            yield Problem("workload.model.resize_vocabulary", why, "resize and save the base first")

    def path_problems(self) -> Iterator[Problem]:
        """With a registry, the file behind a name is known once the registry is read."""
        if self.data.registry is not None:
            yield from missing("workload.data.registry", self.data.registry)
            return
        for path, field in self.sources:
            if not looks_like_hub_id(path):
                yield from missing(field, Path(path).expanduser())

    def resolved(self, run: RunConfig, machine: Machine) -> Self:
        del machine
        rows = self.data.packing and run.engine.needs_rows(run.devices)
        settled = self._with_data(packing=False) if rows else self
        if self.has_rewards:
            return settled.model_copy(update={"reinforcement": self.reinforcement.settled(run.adapter)})
        if self.stage == SFT:
            return settled.model_copy(update={"sft": self.sft.settled(run.adapter)})
        if self.has_preferences:
            return settled.model_copy(update={"preference": self.preference.settled(self.stage, run.adapter)})
        return settled

    def without_effect(self) -> Iterator[tuple[str, str]]:
        if not self.is_packed or self.data.stream or self.has_preferences or self.makes_samples:
            yield "workload.data.fixed_rows", "no rows of known lengths are packed"
        if self.has_preferences:
            yield "workload.data.train_on", "of preferences the answers are trained on"
        if self.has_rewards:
            yield "workload.data.train_on", "the model's own answers are trained on"
        if self.samples != "pairs":
            yield "workload.data.pairs", f"stage {self.stage} learns from no pairs"
        if self._compares_distributions:
            yield "workload.model.fused_loss", "the loss reads whole distributions over the tokens"
        if self.auto_class != CAUSAL:
            yield "workload.model.fused_loss", f"stage {self.stage} has no logits of tokens"
        yield from super().without_effect()

    def notices(self, run: RunConfig) -> Iterator[str]:
        if self.has_conversations and run.engine.needs_rows(run.devices):
            name = run.engine.label
            yield f"batches are padded, not packed: engine={name} needs each sample in a row of its own; same result"

    def compile_doubts(self, run: RunConfig, machine: Machine, packs: bool) -> Iterator[str]:
        yield from super().compile_doubts(run, machine, packs)
        if packs and not self._has_sequence_kernel(run, machine):
            yield f"packed rows in {run.precision} take a kernel here that breaks each block up"

    def _has_sequence_kernel(self, run: RunConfig, machine: Machine) -> bool:
        """Returns whether PyTorch's attention over sequences end to end is available: in 16 bits, from compute
        capability 8.0."""
        new = (machine.compute_capability or (0, 0)) >= (8, 0) and run.precision_spec.compute != "float32"
        return new and self.model.attention in ("auto", "flash")
