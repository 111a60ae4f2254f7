"""The rewards of a run's answers, added up: each asked once, kept in the journal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.config.reinforcement import Reward
from drivetrain.errors import RunError
from drivetrain.rewards.asking import AskedReward, Group, Scored
from drivetrain.runtime.journal import Journal
from drivetrain.workloads.generating import Making, Prompt


@dataclass(frozen=True)
class Answered:
    """An answer. ids: its tokens, the one that ends it among them. truncated: whether none does. key: of the journal.
    group: number of its prompt."""

    prompt: Prompt
    ids: tuple[int, ...]
    text: str
    truncated: bool
    key: str
    group: int


class Rewarding:
    def __init__(self, rewards: Sequence[Reward]) -> None:
        self._weights = {each.label: each.weight for each in rewards}
        self._asked = [AskedReward(each, number) for number, each in enumerate(rewards) if each.model is None]

    def start(self) -> None:
        """Raises UserError with every function that cannot be called."""
        for each in self._asked:
            each.start()

    def values(
        self, groups: Sequence[Sequence[Answered]], scores: Mapping[str, Sequence[float]], passes: Making
    ) -> list[dict[str, Any]]:
        """Returns for each answer, group after group, {"reward": the weighted sum of those that apply, NaN if none does
        or one failed; "values": by name; "failures": reasons by name}. All ranks call it together.

        scores: by the name of each reward model, of all answers.
        """
        everyone: list[list[list[Scored]]] = passes.once(
            lambda: [self._of(each, groups, passes.journal) for each in self._asked]
        )
        found = {name: [Scored(score) for score in of_model] for name, of_model in scores.items()}
        for asked, of_reward in zip(self._asked, everyone, strict=True):
            found[asked.reward.label] = [scored for group in of_reward for scored in group]
        names = list(self._weights)
        rows = zip(*(found[name] for name in names), strict=True)
        return [_summed(dict(zip(names, row, strict=True)), self._weights) for row in rows]

    def _of(self, asked: AskedReward, groups: Sequence[Sequence[Answered]], journal: Journal) -> list[list[Scored]]:
        """Returns one reward's values. Raises RunError if it failed for all of several answers."""
        described = asked.reward.model_dump(mode="json", include={"use", "options"})
        keys = [
            [journal.key("reward", described, answer.key, list(answer.ids)) for answer in group] for group in groups
        ]
        known = [[journal.found(key) for key in of_group] for of_group in keys]
        found: dict[int, Sequence[Scored]] = {
            number: [Scored(*each) for each in of_group]
            for number, of_group in enumerate(known)
            if None not in of_group
        }
        waiting = [(number, _group(group)) for number, group in enumerate(groups) if number not in found]

        def receive(number: int, scored: Sequence[Scored]) -> None:
            given = ([each.value, each.failure] for each in scored)
            journal.keep_all(dict(zip(keys[number], given, strict=True)))
            found[number] = scored

        asked.ask(waiting, receive)
        made = [list(found[number]) for number in range(len(groups))]
        failures = [each.failure for group in made for each in group]
        if len(failures) > 1 and None not in failures:
            raise RunError(f"the reward {asked.reward.label} failed for all {len(failures)} answers: {failures[0]}")
        return made


def _group(answers: Sequence[Answered]) -> Group:
    prompt = answers[0].prompt
    return Group(prompt.text, prompt.reference, [each.text for each in answers], [each.ids for each in answers])


def _summed(scored: Mapping[str, Scored], weights: Mapping[str, float]) -> dict[str, Any]:
    values = {name: each.value for name, each in scored.items() if each.value is not None}
    failures = {name: each.failure for name, each in scored.items() if each.failure is not None}
    total = sum(weights[name] * value for name, value in values.items()) if values and not failures else math.nan
    known = {name: values.get(name, math.nan) for name in weights}
    return {"reward": float(total), "values": known, "failures": failures}
