"""Looks at the rows of prompts for rewards: replies to compare answers with, and columns that functions name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from drivetrain.config.reinforcement import Reward
from drivetrain.data.language.samples import JoinedSamples, PromptRow, PromptSamples
from drivetrain.errors import problem
from drivetrain.workloads.base import Samples

LOOKED_AT = 1_000  # prompts: replies of large data sets are read from disk


def check_references(samples: Samples, rewards: Sequence[Reward], warn: Callable[[str], None]) -> None:
    """Warns where prompts have no reply and a reward needs it. Raises UserError where no answer would get a reward."""
    comparing = [each for each in rewards if _compares(each)]
    known = [row.reference is not None for row in _first(samples)] if comparing else []
    if all(known):
        return
    names = " and ".join(dict.fromkeys(str(each.use) for each in comparing))
    looked = f"{'' if len(known) == len(samples) else 'the first '}{len(known):,} prompts"
    if not any(known) and len(comparing) == len(rewards):
        why = f"of {looked} none has a reply in the data, with which {names} compares answers: none gets a reward"
        fix = "give the rows their right answers (as output), or a reward that needs none: a function or a model"
        raise problem("workload.reinforcement.rewards", why, fix)
    lacking = known.count(False)
    warn(f"of {looked} {lacking:,} have no reply in the data: {names} has nothing to compare their answers with")


def _compares(reward: Reward) -> bool:
    """Returns whether a reward that ships needs the reference."""
    options = reward.options
    needs = {"exact_match": True, "math": True, "regex": options.get("compare"), "code": not options.get("tests")}
    return bool(needs.get(reward.use or ""))


def column_names(every: Sequence[Samples | None], rewards: Sequence[Reward]) -> list[str]:
    """Returns the columns that the first rows have, where a reward may name them."""
    if all(each.import_path is None for each in rewards):
        return []
    return list(dict.fromkeys(name for samples in every for row in _first(samples) for name in row.columns))


def _first(samples: Samples | None) -> Iterator[PromptRow]:
    """Yields the rows of each data set's first prompts."""
    for part in samples.parts if isinstance(samples, JoinedSamples) else ():
        if isinstance(part, PromptSamples):
            yield from islice(part.rows, LOOKED_AT)
