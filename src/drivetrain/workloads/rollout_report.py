"""Reports on a batch of answers and their rewards: means, answers in words, and warnings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.workloads.advantages import deviations
from drivetrain.workloads.made_answers import CORRECTION, DRAWN
from drivetrain.workloads.policy_losses import divergences

WINDOW = 5  # batches of answers whose means are compared
FAR = 0.5  # nats a token from the reference
APART = 0.05  # nats a token between the generator and the trainer
FEW = 0.8  # share of groups without signal


def rollout_metrics(
    made: Sequence[Mapping[str, Any]], rewards: Tensor, names: Sequence[str], by_groups: bool = True
) -> dict[str, float]:
    """Returns means over the answers. rewards: (groups, answers). by_groups: whether advantages come from comparing the
    answers of a group; otherwise nothing of groups is reported.

    entropy: the mean of -log π over tokens as they were drawn, an estimate of the entropy a token. kl: the divergence
    from the reference a token. mismatch, largest_mismatch: how far a token's log-probability by the generator is from
    the one by the trainer, on average and at most, of the answers where that one is known; importance_weight: the mean
    of the weights that make up for it.
    groups_without_signal: share of groups whose rewards are all the same, or unknown.
    """
    lengths = [len(each["ids"]) - each["prompt"] for each in made]
    found = {
        "reward": float(rewards.nanmean()),
        **{f"reward_{name}": _mean([each["values"][name] for each in made]) for name in names},
        "answer_tokens": _mean(lengths),
        "truncated": _mean([each["truncated"] for each in made]),
        "rewards_failed": float(sum(bool(each["failures"]) for each in made)),
    }
    if by_groups:
        within = deviations(rewards)
        found["reward_deviation"] = float(within.mean())
        found["groups_without_signal"] = float((within < 1e-8).double().mean())
    old = torch.cat([each[DRAWN] if _is_unknown(each["old"]) else each["old"] for each in made])
    if len(old):
        found["entropy"] = -float(old.double().mean())
        reference = torch.cat([each["reference"] for each in made])
        if len(reference):
            found["kl"] = float(divergences(old, reference).double().mean())
    return {**found, **_mismatch(made)}


def _mismatch(made: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    known = [each for each in made if DRAWN in each and len(each[DRAWN]) == len(each["old"]) > 0]
    known = [each for each in known if not _is_unknown(each["old"])]
    if not known:
        return {}
    sizes = torch.cat([(each["old"] - each[DRAWN]).double().abs() for each in known])
    found = {"mismatch": float(sizes.mean()), "largest_mismatch": float(sizes.max())}
    weights = [each[CORRECTION] for each in known if CORRECTION in each]
    return {**found, "importance_weight": float(torch.cat(weights).double().mean())} if weights else found


def _is_unknown(old: Tensor) -> bool:
    return bool(old.isnan().any())


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def words_of(made: Mapping[str, Any], decoded: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Returns an answer as samples.jsonl has it."""
    ids, place = made["ids"].tolist(), made["prompt"]
    return {
        "prompt": decoded(ids[:place]),
        "answer": decoded(ids[place:]),
        "reference": made["expected"],
        "reward": made["reward"],
        "rewards": made["values"],
        "advantage": made["advantage"],
        "answer_tokens": len(ids) - place,
        **({"failures": made["failures"]} if made["failures"] else {}),
    }


class History:
    """Metrics of the batches of answers so far, and the warnings that were given."""

    def __init__(self) -> None:
        self._first: list[dict[str, float]] = []
        self._last: list[dict[str, float]] = []
        self._best: float | None = None  # the highest mean reward of WINDOW batches in a row
        self._warned: list[str] = []

    def add(self, metrics: dict[str, float]) -> None:
        if len(self._first) < WINDOW:
            self._first.append(metrics)
        self._last = [*self._last, metrics][-WINDOW:]
        reward = self._of(self._last, "reward")
        if len(self._last) == WINDOW and not math.isnan(reward):
            self._best = reward if self._best is None else max(self._best, reward)

    @property
    def newest(self) -> dict[str, float]:
        return self._last[-1]

    def means(self) -> dict[str, float]:
        """Returns the mean reward and share of groups without signal of the newest batches, the mean reward of as many
        at the beginning, and how many these are: WINDOW, or half of fewer batches. Empty before the first."""
        if not self._last:
            return {}
        count = WINDOW if self._first != self._last else max(1, len(self._last) // 2)
        first, last = self._first[:count], self._last[-count:]
        found = {"batches": float(count), "reward": self._of(last, "reward"), "first_reward": self._of(first, "reward")}
        share = self._of(last, "groups_without_signal")
        return found if math.isnan(share) else {**found, "groups_without_signal": share}

    def warnings(self) -> list[str]:
        """Returns what has become worth a look; each thing once."""
        if len(self._last) < WINDOW:
            return []
        new = {name: text for name, text in self._signs() if name not in self._warned}
        self._warned += new
        return list(new.values())

    def _signs(self) -> list[tuple[str, str]]:
        def now(name: str) -> float:
            return self._of(self._last, name)

        def first(name: str) -> float:
            return self._of(self._first, name)

        best = self._best if self._best is not None else now("reward")
        gain = best - first("reward")
        signs = {
            "reward": gain > 0 and now("reward") < first("reward") and gain > self._noise(),
            "length": now("answer_tokens") > 2 * first("answer_tokens") and now("truncated") > first("truncated"),
            "kl": now("kl") > FAR,
            "signal": now("groups_without_signal") > FEW,
            "entropy": now("entropy") < 0.1 * first("entropy"),
            "mismatch": now("mismatch") > APART and math.isnan(now("importance_weight")),
        }
        over = f"mean of the last {WINDOW} batches of answers"
        texts = {
            "reward": f"the reward has collapsed: {now('reward'):.3g}, {over}, after {best:.3g} at best and "
            f"{first('reward'):.3g} at first: lower optimizer.lr, or give beta",
            "length": f"answers grow: {now('answer_tokens'):.0f} tokens, {over}, after {first('answer_tokens'):.0f} at "
            f"first, and {now('truncated'):.0%} reach max_new_tokens: is length rewarded?",
            "kl": f"the model is far from its reference: {now('kl'):.2g} nats a token, {over}: raise beta, or lower "
            "optimizer.lr",
            "signal": f"{now('groups_without_signal'):.0%} of the groups have no signal, {over}: the answers of each "
            "have the same reward, and nothing is learned from them: take prompts that are neither too hard nor easy",
            "entropy": f"the model answers with little variety: {now('entropy'):.2g} nats a token, {over}, after "
            f"{first('entropy'):.2g} at first: raise clip_high or the temperature",
            "mismatch": f"the generator's log-probabilities are {now('mismatch'):.2g} nats a token off the trainer's, "
            f"{over}: give importance_cap: 2, or a precision of more bits",
        }
        return [(name, texts[name]) for name, there in signs.items() if there]

    def _noise(self) -> float:
        values = [each["reward"] for each in self._first]
        mean = sum(values) / len(values)
        return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))

    @staticmethod
    def _of(batches: Sequence[Mapping[str, float]], name: str) -> float:
        return _mean([each.get(name, math.nan) for each in batches])

    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first, "last": self._last, "best": self._best, "warned": self._warned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._first, self._last = list(state.get("first", [])), list(state.get("last", []))
        self._best, self._warned = state.get("best"), list(state.get("warned", []))
