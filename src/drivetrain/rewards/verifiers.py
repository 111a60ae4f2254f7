"""Verifiers: rewards that compare an answer with the reference, or with a rule. All run in processes of their own.

Each is called with a list of answers, and with the arguments that it names (worker.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from drivetrain.rewards.isolated import Limits, passes

_FENCED = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def exact_match(
    completions: Sequence[str], references: Sequence[str | None], ignore_case: bool = False
) -> list[float | None]:
    """Returns 1 for an answer that is the reference, else 0; white space around both is left out. None without a
    reference."""

    def normal(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    return [
        None if reference is None else float(normal(answer) == normal(reference))
        for answer, reference in zip(completions, references, strict=True)
    ]


def regex(
    completions: Sequence[str], references: Sequence[str | None], pattern: str, compare: bool = False
) -> list[float | None]:
    """Returns 1 for an answer in which the pattern is found, else 0; a dot matches line ends too.

    compare: whether what its first group matched last must also be the reference. Raises ValueError if the pattern has
    no group then.
    """
    expression = re.compile(pattern, re.DOTALL)
    if not compare:
        return [float(expression.search(answer) is not None) for answer in completions]
    if not expression.groups:
        raise ValueError(f"the pattern {pattern!r} has no group to compare")
    found = [[match.group(1) or "" for match in expression.finditer(answer)] for answer in completions]
    return [
        None if reference is None else float(bool(groups) and groups[-1].strip() == reference.strip())
        for groups, reference in zip(found, references, strict=True)
    ]


def math(completions: Sequence[str], references: Sequence[str | None]) -> list[float | None]:
    """Returns 1 for an answer that ends in a value equal to the reference's, else 0: 0.5 is 1/2 and \\frac{1}{2}.

    By Hugging Face's math-verify: the last boxed value, or the last expression or number. None without a reference, and
    for one in which no value is found.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # that there is no time limit; the process has one
    values: list[float | None] = []
    for answer, reference in zip(completions, references, strict=True):
        gold = [] if reference is None else parse(f"${reference.rpartition('####')[2].strip()}$", parsing_timeout=None)
        found = parse(answer.rpartition("####")[2], parsing_timeout=None) if gold else []
        values.append(float(verify(gold, found, timeout_seconds=None)) if gold else None)
    return values


def length(completion_ids: Sequence[Sequence[int]], most: int, over: int) -> list[float]:
    """Returns 0 up to `most - over` tokens of an answer, then less, to -1 at `most` and beyond: Yu et al. 2025, "DAPO",
    equation 13 (soft overlong punishment)."""
    return [min(0.0, max(-1.0, (most - over - len(ids)) / over)) for ids in completion_ids]


def code(
    completions: Sequence[str],
    references: Sequence[str | None],
    tests: str | None = None,
    seconds: float = 5.0,
    memory: int = 512,
    processes: int = 16,
) -> list[float | None]:
    """Returns 1 for an answer whose Python passes the tests, else 0: those of `tests`, then those of its reference.
    None where there are neither.

    The program is the answer's last block in triple backquotes, or the whole answer without one. It is isolated
    (isolated.py), and has so many seconds, MiB of memory and processes.
    """
    limits = Limits(seconds=seconds, memory=memory, processes=processes)
    values: list[float | None] = []
    for answer, reference in zip(completions, references, strict=True):
        asked = "\n".join(each for each in (tests, reference) if each)
        values.append(float(passes(program_of(answer), asked, limits)) if asked else None)
    return values


def program_of(answer: str) -> str:
    blocks = _FENCED.findall(answer)
    return str(blocks[-1]) if blocks else answer
