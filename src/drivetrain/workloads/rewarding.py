"""The rewards of a run's answers, added up: each asked once, kept in the journal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.config.reinforcement import Reward
from drivetrain.data.language.samples import PromptRow
from drivetrain.errors import RunError, counted, together
from drivetrain.rewards.asking import AskedReward, Group, Scored
from drivetrain.runtime.journal import Journal
from drivetrain.workloads.generating import Making, Prompt

ALL_FAILED = "Correct that; train --resume goes on with the answers that came, and asks for their rewards again"


@dataclass(frozen=True)
class Answered:
    """An answer. ids: its tokens, the one that ends it among them. truncated: whether none does. key: of the journal.
    group: number of its prompt. logprobs: with which each token was drawn; empty where that is not known."""

    prompt: Prompt
    ids: tuple[int, ...]
    text: str
    truncated: bool
    key: str
    group: int
    logprobs: tuple[float, ...] = ()


class Rewarding:
    def __init__(self, rewards: Sequence[Reward], columns: Sequence[str] = ()) -> None:
        """columns: those that rows have, which functions of the user's own may name."""
        self._weights = {each.label: each.weight for each in rewards}
        self._asked = [AskedReward(each, n, columns) for n, each in enumerate(rewards) if each.model is None]
        self._notes: dict[tuple[str, str], str] = {}  # by label, and what it is about
        self._reported: set[tuple[str, str]] = set()

    def start(self, keep: bool = True) -> None:
        """Starts the processes of all functions together. Raises UserError with every function that cannot be called;
        no process is left then, nor without `keep`."""
        is_kept = False
        try:
            for each in self._asked:
                each.begin()
            together([each.start for each in self._asked])
            is_kept = keep
        finally:
            for each in self._asked if not is_kept else ():
                each.close()

    def values(
        self, groups: Sequence[Sequence[Answered]], scores: Mapping[str, Sequence[float]], passes: Making
    ) -> list[dict[str, Any]]:
        """Returns for each answer, group after group, {"reward": the weighted sum of those that apply, NaN if none does
        or one failed; "values": by name; "failures": reasons by name}. All ranks call it together.

        scores: by the name of each reward model, of all answers. Raises RunError if a reward failed for all of several
        answers of all ranks together.
        """
        asked_for = passes.once(
            lambda: [(self._of(each, groups, passes.journal), each.wrong_count) for each in self._asked]
        )
        own: list[list[Scored]] = [scored for scored, _ in asked_for]
        everyone = passes.of_data_ranks([_Failures.of(*each) for each in asked_for])
        for asked, of_ranks in zip(self._asked, zip(*everyone, strict=True), strict=True):
            self._note(asked.reward.label, of_ranks)
        found = {name: [Scored(score) for score in of_model] for name, of_model in scores.items()}
        for asked, of_reward in zip(self._asked, own, strict=True):
            found[asked.reward.label] = of_reward
        names = list(self._weights)
        rows = zip(*(found[name] for name in names), strict=True)
        return [_summed(dict(zip(names, row, strict=True)), self._weights) for row in rows]

    def _note(self, label: str, of_ranks: Sequence[_Failures]) -> None:
        """Keeps what a user should know of a reward's calls. Raises RunError if it failed for all of several answers of
        all ranks."""
        answers, failed = sum(each.answers for each in of_ranks), sum(each.failed for each in of_ranks)
        reason = next((each.first for each in of_ranks if each.first is not None), "")
        if failed == answers > 1:
            raise RunError(f"the reward {label} failed for all {answers} answers: {reason}. {ALL_FAILED}")
        if failed:
            why = f"the reward {label} failed for {failed:,} of {counted(answers, 'answer')}: {reason}"
            self._notes.setdefault((label, "failed"), f"{why}. They teach nothing; samples.jsonl has each one's reason")
        for why in (each.wrong_count for each in of_ranks if each.wrong_count is not None):
            again = f"the reward {label} was asked again for each answer by itself: {why}"
            self._notes.setdefault((label, "count"), f"{again}; return a list with a number for each")

    def notes(self) -> list[str]:
        """Returns what a user should know of the calls so far; each thing once."""
        new = {about: note for about, note in self._notes.items() if about not in self._reported}
        self._reported |= new.keys()
        return list(new.values())

    def _of(self, asked: AskedReward, groups: Sequence[Sequence[Answered]], journal: Journal) -> list[Scored]:
        """Returns one reward's values of all answers, group after group. Values that failed are not kept: a run that is
        resumed asks for them again, since the reason, such as a service that was down, may be gone."""
        reward = asked.reward
        decides = {"use", "options", "messages"} if reward.messages else {"use", "options"}  # keys of older journals
        described = reward.model_dump(mode="json", include=decides)
        keys = {
            (number, place): journal.key("reward", described, answer.key, list(answer.ids))
            for number, group in enumerate(groups)
            for place, answer in enumerate(group)
        }
        known = {each: journal.found(key) for each, key in keys.items()}
        found = {each: Scored(*kept) for each, kept in known.items() if kept is not None}
        lacking = {
            number: places
            for number, group in enumerate(groups)
            if (places := [place for place in range(len(group)) if (number, place) not in found])
        }

        def receive(number: int, scored: Sequence[Scored]) -> None:
            new = {(number, place): each for place, each in zip(lacking[number], scored, strict=True)}
            found.update(new)
            journal.keep_all({keys[each]: [value.value] for each, value in new.items() if value.failure is None})
            journal.keep_all({failed(keys[each]): value.failure for each, value in new.items() if value.failure})

        def failed(key: str) -> str:
            return journal.key("failed", key)

        before = [key for each, key in keys.items() if each not in found and journal.found(failed(key)) is not None]
        journal.count_again("rewards", len(before))

        waiting = [(number, _group([groups[number][place] for place in places])) for number, places in lacking.items()]
        asked.ask(waiting, receive)
        return [found[each] for each in keys]


@dataclass(frozen=True)
class _Failures:
    """Failures of a reward on one rank. first: a reason, if there is one. wrong_count: as AskedReward has it."""

    answers: int
    failed: int
    first: str | None
    wrong_count: str | None = None

    @classmethod
    def of(cls, scored: Sequence[Scored], wrong_count: str | None = None) -> _Failures:
        reasons = [each.failure for each in scored if each.failure is not None]
        return cls(len(scored), len(reasons), reasons[0] if reasons else None, wrong_count)


def _group(answers: Sequence[Answered]) -> Group:
    prompt = answers[0].prompt
    row = prompt.row or PromptRow((), prompt.reference, {})
    texts, ids = [each.text for each in answers], [each.ids for each in answers]
    return Group(prompt.text, row.reference, texts, ids, row.columns, row.messages)


def _summed(scored: Mapping[str, Scored], weights: Mapping[str, float]) -> dict[str, Any]:
    values = {name: each.value for name, each in scored.items() if each.value is not None}
    failures = {name: each.failure for name, each in scored.items() if each.failure is not None}
    total = sum(weights[name] * value for name, value in values.items()) if values and not failures else math.nan
    known = {name: values.get(name, math.nan) for name in weights}
    return {"reward": float(total), "values": known, "failures": failures}
