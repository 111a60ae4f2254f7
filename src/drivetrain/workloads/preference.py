"""Trains a language model on pairs of answers, of which one is preferred: DPO and its kin, ORPO, SimPO, CPO.

Both answers of a pair lie in one batch: packed, end to end in one row; padded, in two rows, one below the other. One
forward pass gives the log-probabilities of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.config.preference import LOSSES
from drivetrain.data.branches import begins_of
from drivetrain.data.language.samples import JoinedSamples, Pair, PairSamples, Sample
from drivetrain.data.streams.mixture import StreamedMixture
from drivetrain.memory.transfers import on_host
from drivetrain.models.cross_entropy import cross_entropies, log_square_sums
from drivetrain.models.language_head import places_of_targets
from drivetrain.workloads.against_reference import CARRIED, FromPreferences, numbers_of, summed
from drivetrain.workloads.base import Batch, Outputs, Samples
from drivetrain.workloads.exporting import PlainBatch
from drivetrain.workloads.generating import Prompt
from drivetrain.workloads.language_model import IGNORED
from drivetrain.workloads.language_prompts import OwnSamples, prompts_of_samples
from drivetrain.workloads.loss_contract import NO_CONTEXT, ONE_TERM, LossContext, Partial
from drivetrain.workloads.metrics import MeanOfColumn, Metric
from drivetrain.workloads.preference_losses import Case, Sides, Whole, loss_of

# the columns of predictions, (P, 7)
COLUMNS = (
    *("reward_chosen", "reward_rejected", "reward_accuracy", "logp_chosen", "logp_rejected"),
    *("tokens_chosen", "tokens_rejected"),
)
SIDES = "chosen", "rejected"
HIGHER_IS_BETTER = {"reward_accuracy": True, "reward_chosen": True, "reward_rejected": False, "logp_chosen": True}


class PreferenceWorkload(FromPreferences):
    # --- batches ------------------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[Pair]) -> Batch:
        """Returns the batch of all sides, chosen and rejected in turns: padded 2B rows, packed one."""
        sides = [side for pair in samples for side in pair.sides]
        shared = [count for pair in samples for count in (0, pair.shared)] if self.shares_prompts else None
        return {**self._laid_out(sides, shared), **self._carried(samples)}

    def shown(self, sample: Pair) -> str:
        chosen, rejected = (super(PreferenceWorkload, self).shown(side) for side in sample.sides)
        return f"chosen: {chosen}\nrejected: {rejected}"

    def sides(self, sample: Pair) -> Mapping[str, Sample]:
        return dict(zip(SIDES, sample.sides, strict=True))

    def _lengths_of(self, samples: JoinedSamples | StreamedMixture) -> list[int] | None:
        return pair_lengths(samples, self.packs, self.shares_prompts) if isinstance(samples, JoinedSamples) else None

    def _pairs(self, batch: Batch) -> int:
        """Returns the number of pairs, known on the host."""
        if not self.packs:
            return len(batch["targets"]) // 2
        return int(begins_of(on_host(batch["position_ids"])).sum()) // 2

    # --- the loss -----------------------------------------------------------------------------------------------------

    @property
    def terms(self) -> Mapping[str, float]:
        return ONE_TERM if list(self._losses.values()) == [1.0] else self._losses

    def counts(self, batch: Batch) -> Mapping[str, int]:
        pairs = self._pairs(batch)
        counts = {}
        for name, loss in zip(self.terms, self._losses, strict=True):
            counts[name] = self._chosen_tokens(batch) if LOSSES[loss].by_tokens else pairs
        return counts

    def _chosen_tokens(self, batch: Batch) -> int:
        here = {name: torch.as_tensor(on_host(tensor)) for name, tensor in batch.items()}
        sides = self._sample_of(here)[here["targets"] != IGNORED]
        return int((sides % 2 == 0).sum())

    @property
    def has_statistics(self) -> bool:
        return any(LOSSES[name].whole_batch for name in self._losses)

    def statistics(self, model: nn.Module, batch: Batch, context: LossContext) -> Partial:
        """Returns each pair's log-probabilities under model and reference, (P, 2) each."""
        policy, _, _ = self._log_probabilities(model, batch)
        return Partial(rows={"policy": policy, "reference": self._compared(model, batch, context)})

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        case = self._case(model, batch, context)
        return {term: loss_of(name, case) for term, name in zip(self.terms, self._losses, strict=True)}

    def _case(self, model: nn.Module, batch: Batch, context: LossContext) -> Case:
        rows, own = context.statistics.rows, context.statistics.own
        known = rows and own is not None
        pairs = self._pairs(batch)
        if known:
            assert own is not None
            reference = rows["reference"][own[:pairs]]
        else:
            reference = self._compared(model, batch, context)
        policy, tokens, full, weights = self._weighed(model, batch)
        if known:
            assert own is not None
            whole = Whole(rows["policy"], rows["reference"], own[:pairs])
        else:  # of an evaluation, which has no statistics: the batch's own pairs
            whole = Whole(policy.detach(), reference, torch.arange(pairs, device=policy.device))
        return Case(Sides(policy, reference, tokens, full, weights), whole, self._settings, self._beta)

    def _compared(self, model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
        """Returns the reference's log-probabilities, (P, 2); 0 where there is none."""
        if CARRIED in batch:
            return batch[CARRIED]
        with self._reference(model, context) as reference:
            if reference is None:
                return torch.zeros(self._pairs(batch), 2, device=batch["targets"].device)
            return self._log_probabilities(reference, batch)[0]

    def _reference_rows(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._log_probabilities(model, batch)[0]

    def _log_probabilities(self, model: Callable[..., Any], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (P, 2) each: log-probabilities of the answers, weighted by ld_alpha; tokens; log-probabilities."""
        return self._of_sides(*self._answers(model, batch, 2 * self._pairs(batch)))

    def _weighed(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns the same, and each pair's weight, (P,), if pairs are weighted: Zhou et al. 2024, "WPO: Enhancing RLHF
        with Weighted Preference Optimization", equation 2, the likelihood a token of either answer, multiplied, without
        gradient; each token's in proportion to that of a token that the model draws itself (sampled alignment): log p -
        log Σ p²."""
        if not self._settings.likelihood_weights:
            return *self._log_probabilities(model, batch), None
        targets, count = batch["targets"], 2 * self._pairs(batch)
        places = places_of_targets(targets)
        logits = self._head.logits_at_targets(model, self._given(batch), targets)
        found = -cross_entropies(logits, targets.flatten()[places])
        sides = self._sample_of(batch).flatten()[places]
        tokens = numbers_of(sides, count)
        aligned = summed(found.detach() - log_square_sums(logits), sides, count) / tokens.clamp(min=1)
        return *self._of_sides(found, sides, tokens), aligned.view(-1, 2).sum(1).exp()

    def _of_sides(self, found: Tensor, sides: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """found, sides: (N,), the log-probability and the side of each target; tokens: (2P,), of each side."""
        count = len(tokens)
        full = summed(found, sides, count)
        weighted = full
        if self._settings.ld_alpha is not None:
            # Liu et al. 2024, "Length Desensitization in Direct Preference Optimization", equation 8
            shorter = tokens.view(-1, 2).amin(1).repeat_interleave(2)
            place = torch.arange(len(sides), device=sides.device) - (tokens.cumsum(0) - tokens)[sides]
            weights = torch.where(place < shorter[sides], 1.0, self._settings.ld_alpha)
            weighted = summed(found * weights, sides, count)
        return weighted.view(-1, 2), tokens.view(-1, 2), full.view(-1, 2)

    # --- evaluation and prediction ------------------------------------------------------------------------------------

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return self.outputs_in(model, batch, NO_CONTEXT)

    def outputs_in(self, model: nn.Module, batch: Batch, context: LossContext) -> Outputs:
        case = self._case(model, batch, context)
        counts = self.counts(batch)
        terms = {term: (loss_of(name, case), counts[term]) for term, name in zip(self.terms, self._losses, strict=True)}
        sides = case.sides
        rewards = self._rewards(sides)
        right = (rewards[:, 0] > rewards[:, 1]).float()[:, None]
        found = torch.cat([rewards, right, sides.full, sides.tokens.float()], 1)
        first = next(iter(terms.values()))
        return Outputs(first[0], first[1], found, found, terms if len(terms) > 1 else {})

    def _rewards(self, sides: Sides) -> Tensor:
        """Returns the rewards that the loss implies, (P, 2): β times the log-ratio; log-probability a token in ORPO and
        SimPO, which have no reference."""
        normalised = {"orpo", "simpo"} & self._losses.keys()
        return self._beta * (sides.average if normalised else sides.ratios)

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Returns each pair's log-probabilities; for a batch that `next_batch` made, the next tokens."""
        if "draws" in batch:
            return super().predict(model, batch)
        _, tokens, found = self._log_probabilities(model, batch)
        rows = zip(found.tolist(), tokens.tolist(), strict=True)
        names = ("logp_chosen", "logp_rejected"), ("tokens_chosen", "tokens_rejected")
        return [
            {
                **{name: round(value, 6) for name, value in zip(names[0], logps, strict=True)},
                **dict(zip(names[1], counts, strict=True)),
            }
            for logps, counts in rows
        ]

    def metrics(self) -> Mapping[str, Metric]:
        return {name: MeanOfColumn(number, HIGHER_IS_BETTER.get(name)) for number, name in enumerate(COLUMNS)}

    def derived(self, values: Mapping[str, float]) -> dict[str, float]:
        return {"reward_margin": values["reward_chosen"] - values["reward_rejected"]}

    # --- prompts, and the plain form --------------------------------------------------------------------------------

    def prompts_for(self, samples: Samples, numbers: Iterable[int]) -> Mapping[int, Prompt]:
        return prompts_of_samples(OwnSamples(samples), numbers, self._reader.tokenizer)

    def plain_batch(self, model: nn.Module, samples: Sequence[Pair]) -> PlainBatch:
        return super().plain_batch(model, [pair.chosen for pair in samples])


def pair_lengths(samples: JoinedSamples, packs: bool, shares: bool) -> list[int]:
    """Returns the positions of each pair: packed those of both sides, padded twice those of the longer. shares: whether
    packed sides share their prompt, whose positions then count once."""
    found: list[int] = []
    for part in samples.parts:
        assert isinstance(part, PairSamples)
        both = np.stack([part.chosen.lengths, part.rejected.lengths]) - 1
        lengths = both.sum(0) if packs else 2 * both.max(0)
        found += (lengths - part.shared if shares else lengths).tolist()
    return found
