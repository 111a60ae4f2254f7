"""What a user sees when something they gave cannot work: every problem at once, each with its cure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where it was given, why it fails, what to do."""

    field: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field}: {self.why}\n    {self.fix}"


class UserError(ValueError):
    """Something the user gave cannot work. Raised before work starts; the CLI prints it and exits with code 2."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a UserError names at least one problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class RunError(RuntimeError):
    """The run itself failed (a NaN loss, a full disk). The CLI prints it and exits with code 1."""


def problem(field: str, why: str, fix: str) -> UserError:
    """A UserError with a single problem."""
    return UserError([Problem(field, why, fix)])
