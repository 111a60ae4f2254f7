"""Checks a run that was killed again and again while it learned from rewards, pairs or a teacher."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.phased_run import DRAWING, REWARDS
from bench.reward_runs import Place
from tests.launch.chaos import same_end


@dataclass
class Killed:
    """A run that was killed and came to its end as it should. moments: what was under way at each kill."""

    name: str
    moments: list[str] = field(default_factory=list)
    victims: list[str] = field(default_factory=list)  # what was killed each time, where that is not the only process
    engine: str = ""  # of a run on several ranks
    drawn: int = 0  # answers
    drawn_again: int = 0
    asked: int = 0  # rewards
    asked_again: int = 0
    cached: int = 0  # how often the pass over the data began that computes what is cached
    seconds: float = 0.0

    @property
    def title(self) -> str:
        return f"{self.name}, {self.engine}" if self.engine else self.name


def check(found: Killed, whole: Place, disturbed: Place, ended_in: Mapping[int, str], passes_cut: int) -> None:
    """AssertionError if anything is lost, was asked for again, or differs.

    ended_in: what was under way where each start of a process ended. passes_cut: how many starts ended while they
    computed what is cached.
    """
    same_end(disturbed.folder / "run", whole.folder / "run")
    assert rollouts(disturbed) == rollouts(whole), "answers or their rewards differ"
    killed_in = {phase: {n for n, each in ended_in.items() if each == phase} for phase in (DRAWING, REWARDS)}
    both = whole.calls("answers"), disturbed.calls("answers")
    found.drawn, found.drawn_again = counted(*both, killed_in[DRAWING])
    both = whole.calls("rewards"), disturbed.calls("rewards")
    found.asked, found.asked_again = counted(*both, killed_in[REWARDS])
    if found.name == "dpo":
        wanted = 1 + passes_cut
        assert found.cached == wanted, f"what is cached was computed {found.cached} times, for {passes_cut} kills in it"
    left = [path.name for path in disturbed.folder.rglob("*partial*")]
    assert not left, f"unfinished files are left: {left}"


def rollouts(place: Place) -> dict[int, list[Any]]:
    """Returns for each step the means that were reported last of its answers, with the answers themselves."""
    found = {event["step"]: [event["metrics"]] for event in place.events if event["event"] == "rollout"}
    path = place.folder / "run" / "samples.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for step, means in found.items():
        means += sorted({json.dumps(line, sort_keys=True) for line in lines if line.get("step") == step})
    return found


def counted(
    whole: Sequence[tuple[int, Sequence[str]]], calls: Sequence[tuple[int, Sequence[str]]], excused: Iterable[int]
) -> tuple[int, int]:
    """Returns how much was asked for, and how much of it again.

    whole: the calls of the undisturbed run. excused: starts that were killed while a call was under way, whose last
    call a later start may make again. AssertionError if anything else was asked for again, or never.
    """
    pardoned, last = set(excused), {start: items for start, items in calls}
    wanted = Counter(each for _, items in whole for each in items)
    asked, spare, wrong = Counter[str](), Counter[str](), set[str]()
    for start in last:  # in the order in which they first asked
        own = [each for number, items in calls if number == start for each in items]
        asked.update(own)
        wrong |= {each for each in own if asked[each] > wanted[each] + spare[each]}
        if start in pardoned:
            spare.update(last[start])
    wrong |= {each for each in wanted if asked[each] < wanted[each]}
    often = {each: (asked[each], wanted[each]) for each in wrong}
    assert not wrong, f"asked for so often, and by an undisturbed run: {often}"
    return asked.total(), asked.total() - wanted.total()
