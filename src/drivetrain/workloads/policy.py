"""Trains a language model on rewards for its own answers: GRPO and its kin, RLOO.

At the first of the steps that use them, the model answers the prompts of a global batch, several times each; rewards
are asked for, and each answer's advantage is how much better it was rewarded than the others of its group. Answers with
their rewards are a part of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.config.generation import Generation
from drivetrain.config.language import LanguageModel
from drivetrain.config.reinforcement import LOSSES, PPO, RLOO
from drivetrain.data.branches import begins_of
from drivetrain.data.language.samples import PromptSample
from drivetrain.data.ordered_cuts import OrderedSizes
from drivetrain.memory.transfers import on_host
from drivetrain.models.cross_entropy import cross_entropies
from drivetrain.models.language_head import places_of_targets
from drivetrain.workloads.against_reference import AgainstReference, numbers_of
from drivetrain.workloads.base import Batch, BestMetric, Samples
from drivetrain.workloads.exporting import PlainBatch
from drivetrain.workloads.generating import JudgedAnswer, JudgesAnswers, MakesSamples, Making, Prompt, Rollout
from drivetrain.workloads.judged_rows import check_references, column_names
from drivetrain.workloads.language_model import IGNORED
from drivetrain.workloads.loss_contract import LOSS, ONE_TERM, Auxiliary, LossContext
from drivetrain.workloads.made_answers import (
    CORRECTION,
    VALUES,
    Made,
    correction_of,
    draw_of,
    drawn_answers,
    invented_answer,
    judged_answer,
    made_of,
    sample_of,
    shared,
    sizes_of,
    values_of,
    with_advantages,
    with_answers,
)
from drivetrain.workloads.metrics import Metric
from drivetrain.workloads.policy_losses import FORMULAS, Tokens, averaged, divergences
from drivetrain.workloads.reward_models import RewardModel
from drivetrain.workloads.rewarding import Answered, Rewarding
from drivetrain.workloads.rollout_report import History, rollout_metrics, words_of

KL = "kl"


class PolicyWorkload(AgainstReference, MakesSamples, JudgesAnswers):
    columns: tuple[str, ...] = VALUES

    def __init__(self, config: LanguageModel, seed: int) -> None:
        super().__init__(config, seed)
        self._learning, self._loss = config.reinforcement, config.reinforcement.loss_of(config.stage)
        learning, rewards = self._learning, self._learning.rewards
        self._each, self._importance = learning.answers_of(config.stage), learning.importance_of(config.stage)
        self.passes_per_batch, self.server = learning.passes, learning.server
        check_references(self.train, rewards, self._reader.warn)
        self._rewarding = Rewarding(rewards, column_names((self.train, self.evaluation), rewards))
        self._reward_models = [
            RewardModel(each, number, self.tokenizer) for number, each in enumerate(rewards) if each.model is not None
        ]
        # the advantage of an answer in a group comes from the others of its group; ppo's does not
        self._history, self._by_groups = History(), config.stage != PPO

    @property
    def updates_per_batch(self) -> int:
        return self._learning.updates

    # --- batches ------------------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Returns the batch of answers, and their `columns`, fp32, shaped as targets."""
        made = with_answers(samples, self._learning.max_new_tokens)
        batch = self._laid_out([sample_of(each) for each in made], shared(made) if self.shares_prompts else None)
        places = (batch["targets"] != IGNORED).flatten()
        for name in (*self.columns, *([CORRECTION] if self._learning.corrects else [])):
            flat = torch.zeros(batch["targets"].numel())
            flat[places] = torch.cat([values_of(each, name) for each in made])
            batch[name] = flat.view_as(batch["targets"])
        return batch

    def made_sizes(self, samples: Sequence[Any]) -> OrderedSizes:
        return sizes_of(with_answers(samples, self._learning.max_new_tokens), self.shares_prompts, self.packs)

    def stand_ins(self, prompts: Sequence[Any]) -> Sequence[Any]:
        return [prompt for prompt in prompts for _ in range(self._each)]

    def invented(self, prompt: Any, number: int) -> Any:
        return invented_answer(prompt, number, self._learning.max_new_tokens)

    def shown(self, sample: Any) -> str:
        ids = sample["ids"] if isinstance(sample, dict) else sample.ids
        return str(self._reader.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False))

    @property
    def lengths(self) -> Sequence[int] | None:
        """Returns None: the lengths of answers are not known before they are made."""
        return None

    @property
    def evaluation_lengths(self) -> Sequence[int] | None:
        return None

    def _count(self, batch: Batch) -> int:
        """Returns the number of answers, known on the host."""
        if not self.packs:
            return len(batch["targets"])
        return int(begins_of(on_host(batch["position_ids"])).sum())

    @property
    def auxiliary(self) -> Mapping[str, Auxiliary]:
        return {**super().auxiliary, **{each.name: each.auxiliary for each in self._reward_models}}

    # --- the loss -----------------------------------------------------------------------------------------------------

    @property
    def terms(self) -> Mapping[str, float]:
        return {LOSS: 1.0, KL: self._learning.beta} if self._learning.beta and self._config.stage != RLOO else ONE_TERM

    def counts(self, batch: Batch) -> Mapping[str, int]:
        by_tokens = LOSSES[self._loss].mean == "tokens"
        return dict.fromkeys(self.terms, self.count(batch) if by_tokens else self._count(batch))

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        del context  # the reference's log-probabilities came with the answers
        policy, owner, lengths = self._answers(model, batch, self._count(batch))
        places = places_of_targets(batch["targets"])
        advantage, old, reference = (batch[name].flatten()[places] for name in VALUES)
        old = torch.where(old.isnan(), policy.detach(), old)
        tokens, mean = Tokens(policy, old, advantage, owner, lengths), LOSSES[self._loss].mean
        found = FORMULAS[self._loss](tokens, self._learning, self._importance)
        losses = {LOSS: self._corrected(found, batch, places)}
        if KL in self.terms:
            weights = tokens.ratios(self._importance) if self._learning.kl_ratio else 1.0
            losses[KL] = divergences(policy, reference) * weights
        return {name: averaged(each, tokens, mean, self._learning.max_new_tokens) for name, each in losses.items()}

    def _corrected(self, losses: Tensor, batch: Batch, places: Tensor) -> Tensor:
        """Returns the tokens' losses, weighed where the generator's probabilities are made up for."""
        if not self._learning.corrects:
            return losses
        return losses * batch[CORRECTION].flatten()[places]

    def _answers(self, model: Callable[..., Any], batch: Batch, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns log-probabilities at the temperature that answers are drawn at."""
        if self._learning.temperature == 1:
            return super()._answers(model, batch, count)
        targets = batch["targets"]
        logits = self._head.logits_at_targets(model, self._given(batch), targets)  # type: ignore[arg-type]
        places = places_of_targets(targets)
        owner = self._sample_of(batch).flatten()[places]
        losses = cross_entropies(logits / self._learning.temperature, targets.flatten()[places])
        return -losses, owner, numbers_of(owner, count)

    # --- answers ------------------------------------------------------------------------------------------------------

    def start_processes(self, keep: bool) -> None:
        self._rewarding.start(keep)

    def make_samples(self, prompts: Sequence[Any], draws: Sequence[int], passes: Making) -> Sequence[Sequence[Any]]:
        passes.once(self._rewarding.start)
        each = self._each
        own = [draw_of(draw, number) for draw in draws for number in range(each)]
        asked = [self._prompt(prompt) for prompt in prompts for _ in range(each)]
        answers = self._answered(asked, own, passes, self._learning.drawing, prompts)
        groups = [answers[place : place + each] for place in range(0, len(answers), each)]
        values = self._rewarding.values(groups, self._scores(answers, passes), passes)
        masks = self._learning.mask_truncated
        made = [made_of(answer, found, masks) for answer, found in zip(answers, values, strict=True)]
        measured = made if self._compares_with_old else made[:1]  # the one shows the generator's mismatch
        for sample, known in zip(measured, passes.each(measured, self._known), strict=True):
            sample.update(known)
            if self._learning.corrects:
                sample[CORRECTION] = correction_of(sample, self._learning)
        return [made[place : place + each] for place in range(0, len(made), each)]

    @property
    def _compares_with_old(self) -> bool:
        """Whether log-probabilities under the model that answered have to be known before the update. Where each answer
        is learned from once, in one update, they are that update's own."""
        learning, stage = self._learning, self._config.stage
        once = learning.updates == learning.passes == 1
        return not once or learning.corrects or bool(learning.beta) or stage == PPO

    def _answered(
        self,
        asked: Sequence[Prompt],
        draws: Sequence[int],
        passes: Making,
        drawing: Generation,
        prompts: Sequence[PromptSample],
    ) -> list[Answered]:
        """Returns an answer to each; those that the journal has are not made again."""
        answers, each = [], len(asked) // max(1, len(prompts))
        for number, (drawn, key) in enumerate(drawn_answers(asked, draws, drawing, passes)):
            ids, ended = drawn.tokens, drawn.tokens[-1] in self.ends
            text = self.decoded(ids[:-1] if ended else ids)
            logprobs = tuple(drawn.logprobs)
            answers.append(Answered(asked[number], tuple(ids), text, not ended, key, number // each, logprobs))
        return answers

    def _scores(self, answers: Sequence[Answered], passes: Making) -> dict[str, list[float]]:
        """Returns the score of each answer by each reward model."""

        def scored(model: nn.Module, batch: Batch, context: LossContext) -> list[tuple[float, ...]]:
            del model
            whole = self._whole(batch)
            return list(zip(*(each.scores(context.auxiliary, whole) for each in self._reward_models), strict=True))

        if not self._reward_models:
            return {}
        rows = passes.each([made_of(each, {}, masks_truncated=False) for each in answers], scored)
        return {model.reward.label: [row[n] for row in rows] for n, model in enumerate(self._reward_models)}

    def _whole(self, batch: Batch) -> list[Tensor]:
        """Returns the ids of each answer with its prompt; its tokens are all targets."""
        places = batch["targets"] != IGNORED
        owner = self._sample_of(batch)
        ends = [int(torch.nonzero(places & (owner == number))[-1, 1]) for number in range(self._count(batch))]
        found: list[Tensor] = []
        for number, end in enumerate(ends):
            row = 0 if self.packs else number
            own = owner[row] == number
            own[end + 1 :] = False  # padding
            # an answer that shares its prompt begins where that ends
            shared = int(batch["position_ids"][row][own][0])
            root = found[-1][:shared] if shared else batch["input_ids"][row, :0]
            found.append(torch.cat([root, batch["input_ids"][row][own], batch["targets"][row, end : end + 1]]))
        return found

    def _known(self, model: nn.Module, batch: Batch, context: LossContext) -> list[dict[str, Tensor]]:
        """Returns each answer's log-probabilities under the model, and under the reference if there is one, and what
        else of the answer's tokens the loss compares with."""
        own, lengths = self._of_tokens(model, batch, context)
        with self._reference(model, context) as reference:
            beside = own["old"][:0] if reference is None else self._answers(reference, batch, self._count(batch))[0]
        sizes = lengths.tolist()
        held = beside.split(sizes) if len(beside) else [beside] * len(sizes)
        split = {"reference": held, **{name: values.split(sizes) for name, values in own.items()}}
        return [{name: parts[number].cpu() for name, parts in split.items()} for number in range(len(sizes))]

    def _of_tokens(self, model: nn.Module, batch: Batch, context: LossContext) -> tuple[dict[str, Tensor], Tensor]:
        """Returns values of the N tokens of the answers by their names, (N,) each, as the model has them before it
        learns from the answers; and the number of tokens of each answer."""
        del context
        policy, _, lengths = self._answers(model, batch, self._count(batch))
        return {"old": policy}, lengths

    def keep_made(self, step: int, samples: list[Any]) -> None:
        """Receives the answers of all ranks; their advantages are of the whole batch."""
        rewards = torch.tensor([each["reward"] for each in samples], dtype=torch.float64).view(-1, self._each)
        super().keep_made(step, self._with_advantages(samples, rewards))
        names = [each.label for each in self._learning.rewards]
        self._history.add(rollout_metrics(self.made, rewards, names, self._by_groups))

    def _with_advantages(self, samples: Sequence[Made], rewards: Tensor) -> list[Made]:
        return with_advantages(samples, rewards, self._learning, self._config.stage)

    def rollout(self) -> Rollout:
        lines = [words_of(each, self.decoded) for each in self.made]
        return Rollout(self._history.newest, lines, [*self._history.warnings(), *self._rewarding.notes()])

    def rollout_means(self) -> dict[str, float]:
        return self._history.means()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "history": self._history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._history.load_state_dict(state.get("history", {}))

    # --- evaluation and prediction ------------------------------------------------------------------------------------

    def judged(self, prompts: Sequence[Any], draws: Sequence[int], passes: Making) -> list[JudgedAnswer]:
        passes.once(self._rewarding.start)
        asked = [self._prompt(prompt) for prompt in prompts]
        answers = self._answered(asked, draws, passes, self.settings, prompts)
        values = self._rewarding.values([[each] for each in answers], self._scores(answers, passes), passes)
        return [judged_answer(answer, found) for answer, found in zip(answers, values, strict=True)]

    @property
    def settings(self) -> Generation:
        """Returns `generate`, or the likeliest tokens, as many as answers may have in training."""
        return self._config.generate or Generation(max_new_tokens=self._learning.max_new_tokens)

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Returns nothing beside the answers, which are made elsewhere."""
        if "behind" in batch:
            return super().predict(model, batch)
        return [{} for _ in range(self._count(batch))]

    def metrics(self) -> Mapping[str, Metric]:
        return {}

    def derived(self, values: Mapping[str, float]) -> dict[str, float]:
        del values
        return {}

    @property
    def best_metric(self) -> BestMetric:
        return BestMetric("reward", higher_is_better=True)

    # --- prompts, and the plain form ----------------------------------------------------------------------------------

    @property
    def answers_samples(self) -> bool:
        return True

    def prompts_for(self, samples: Samples, numbers: Iterable[int]) -> Mapping[int, Prompt]:
        return {number: self._prompt(samples.load(number, 0)) for number in numbers}

    def _prompt(self, sample: PromptSample) -> Prompt:
        ids = sample.ids.tolist()
        text = self._reader.tokenizer.decode(ids, skip_special_tokens=True)
        return Prompt(text, tuple(ids), sample.row.reference, row=sample.row)

    def plain_batch(self, model: nn.Module, samples: Sequence[Any]) -> PlainBatch:
        return super().plain_batch(model, [(each.ids, np.ones(len(each.ids), dtype=bool)) for each in samples])
