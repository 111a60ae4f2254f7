"""The problems of ways to run, all of which rules refuse: each reason once."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.errors import Problem


def distinct_problems(ways: Sequence[Sequence[Problem]]) -> list[Problem]:
    """Returns the problems of several ways, each field and reason once, with the cure of the first way that has it:
    cures name what an engine can do, and differ where the reason (what the device lacks) is the same."""
    found: dict[tuple[str, str], Problem] = {}
    for problem in (problem for way in ways for problem in way):
        found.setdefault((problem.field, problem.why), problem)
    return list(found.values())


def shared_problems(ways: Sequence[Sequence[Problem]]) -> list[Problem]:
    """Returns those of them that every way has. Where there are some, they are what is wrong with a run whose ways the
    search, and not the user, named."""
    reasons = [{(each.field, each.why) for each in way} for way in ways]
    return [each for each in distinct_problems(ways) if all((each.field, each.why) in way for way in reasons)]
