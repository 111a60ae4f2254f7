"""Rewards as users write them, among them those that fail."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any


def short(completions: list[str], **others: Any) -> list[float]:
    assert set(others) == {"prompts", "completion_ids", "references"}
    print("printing is no answer")
    return [-len(each) for each in completions]  # type: ignore[misc]


def by_level(completions: list[str], answer: list[str], level: list[int | None], base: int) -> list[float]:
    assert len(completions) == len(answer) == len(level)
    return [base + (each or 0) * (text == right) for text, right, each in zip(completions, answer, level, strict=True)]


def names(**others: Any) -> list[float]:
    assert set(others) == {"prompts", "completions", "completion_ids", "references", "level", "no name"}
    assert others["prompts"] == ["p"]
    return [float(each) for each in others["level"]]


def star(completions: list[str], *rest: Any) -> list[float]:
    assert not rest
    return [len(each) for each in completions]


def of_messages(prompts: list[Any], completions: list[Any]) -> list[int]:
    asked = [prompt[-1]["content"] for prompt in prompts]
    return [len(one) + len(answer[0]["content"]) for one, answer in zip(asked, completions, strict=True)]


def of_row(prompts: list[Any], completions: list[Any], level: list[int], answer: list[int]) -> list[float]:
    for prompt, twice, right in zip(prompts, level, answer, strict=True):
        assert prompt == [{"role": "user", "content": f"say {right}"}]
        assert twice == 2 * right
    return [each + len(one[0]["content"]) / 1000 for each, one in zip(level, completions, strict=True)]


def fails_for_short(completions: list[str]) -> list[float]:
    """Fails for about half of the answers of a model that knows nothing."""
    if any(text.encode().hex() < "8" for text in completions):
        raise ValueError("too short")
    return [1.0 for _ in completions]


async def later(completions: list[str], factor: float) -> list[float]:
    await asyncio.sleep(0.01)
    return [factor * len(each) for each in completions]


def odd(completions: list[str]) -> Any:
    """Fails in the way that one of the answers names."""
    for text in completions:
        if text == "raise":
            raise ValueError("no such answer")
        if text == "unspeakable":
            raise Nameless
        if text == "exit":
            sys.exit(3)
        if text == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "hang":
            time.sleep(600)
        if text == "few":
            return [0.5] * (len(completions) - 1)
    values = {"nan": float("nan"), "none": None, "words": "high"}
    return [values.get(text, 1) for text in completions]


class Nameless(Exception):
    """Has no words for itself."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    __str__ = __repr__


def no_floats(completions: list[str], file: str) -> list[Any]:
    """Notes how many answers it is asked about, and returns for each the value that it names."""
    with Path(file).open("a") as lines:
        lines.write(f"{len(completions)}\n")
    values = {
        "huge": 10**400,
        "longer than can be printed": 10**5000,
        "decimal": Decimal("0.5"),
        "complex": 1j,
        "nameless": Nameless(),
        "wordless": [1] * 99,
    }
    return [values.get(text, 1) for text in completions]


def starting(completions: list[str], file: str) -> list[float]:
    """Starts a process, and waits for its end."""
    with subprocess.Popen(["sleep", "600"]) as process:
        Path(file).write_text(str(process.pid))
    return [0.0] * len(completions)


def patient(completions: list[str]) -> list[float]:
    if "slow" in completions:
        time.sleep(3)
    return [0.0] * len(completions)


def flaky(completions: list[str], file: str) -> list[float]:
    """Fails until there is a file; notes each answer that it is asked about then."""
    if not Path(file).exists():
        raise OSError("the service is down")
    return counted(completions, file)


def counted(completions: list[str], file: str) -> list[float]:
    """Notes each answer that it is asked about."""
    with Path(file).open("a") as lines:
        lines.writelines(f"{text!r}\n" for text in completions)
    return [float(len(text) % 5) for text in completions]


def waited(completions: list[str], file: str) -> list[float]:
    """Notes that it was asked, and waits until there is another file."""
    with Path(file).open("a") as lines:
        lines.write(f"{completions}\n")
    while not Path(f"{file}.go").exists():
        time.sleep(0.01)
    return [float(len(text)) for text in completions]


def needs_more(completions: list[str], solution: list[str]) -> list[float]:
    return [float(a == b) for a, b in zip(completions, solution, strict=True)]


def other_names(answers: list[str]) -> list[float]:
    return [0.0] * len(answers)


def one_alone(completions: list[str]) -> list[float]:
    """Returns a single reward, however many answers there are."""
    return [float(len(completions[0]) % 5)]


def never(completions: list[str]) -> list[None]:
    return [None] * len(completions)


def failing_at(completions: list[str], file: str) -> list[None]:
    """Fails for the first answer that it is asked about, and applies to no other."""
    if not Path(file).exists():
        Path(file).touch()
        raise ValueError("the first")
    return never(completions)


def letters(completions: list[str]) -> list[int]:
    return [sum(letter.isascii() and letter.isalpha() for letter in text) for text in completions]
