"""When the runs of bench/reward_kills.py are killed: at a random instant in what each kill is aimed at, by turns."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

from bench.phased_run import CACHING, DRAWING, REWARDS, STARTING, Shared
from bench.reward_runs import Place

PATIENCE = 180.0
STARTING_SECONDS = 1.5
STEPS_A_KILL = 8  # so that a run outlasts its kills
SHARE_OF_CACHING = 0.5  # in which kills come
MOST_ENTRIES = 4  # a kill comes the first to fourth time that what it is aimed at is under way
ROLLOUTS = (DRAWING, REWARDS, "log-probabilities of answers", "update", REWARDS, DRAWING, "saving", STARTING)
# run → what its kills are aimed at, in turns
AIMS: Mapping[str, Sequence[str]] = {
    "grpo": ROLLOUTS,
    "ppo": ROLLOUTS,
    "dpo": (CACHING, CACHING, CACHING, CACHING, CACHING, CACHING, "update", "saving", "update", STARTING),
    "distill": (DRAWING, "update", DRAWING, "saving", STARTING),
}


def aimed_at(name: str, number: int, place: Place) -> str:
    """Returns what a run's kill of that number is aimed at."""
    aim = AIMS[name][number % len(AIMS[name])]
    return "update" if aim == CACHING and place.has_cached else aim


def reached(shared: Shared, goes_on: Callable[[], bool], aim: str, usual: Shared, dice: random.Random) -> bool:
    """Waits for a random instant in what is aimed at. Returns whether the run still goes on then.

    shared: what the run, or one of its ranks, says of itself. usual: the same of the undisturbed run.
    """
    if aim == STARTING:
        time.sleep(dice.uniform(0, STARTING_SECONDS))
        return goes_on()
    wanted, until = 1 if aim == CACHING else dice.randint(1, MOST_ENTRIES), time.monotonic() + PATIENCE
    while shared.begun(aim) < wanted:
        if not goes_on():
            return False
        assert time.monotonic() < until, f"{aim} does not come"
        time.sleep(0.0005)
    # it may be over then, which the counts show; of what a run does once that would leave nothing to kill
    time.sleep(dice.uniform(0, (SHARE_OF_CACHING if aim == CACHING else 1.0) * usual.mean_seconds(aim)))
    return goes_on()
