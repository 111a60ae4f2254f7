"""Errors that a user sees when something cannot work: every problem at once, each with its cure."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
MOST_SHOWN = 60  # characters of a value that a message quotes
MOST_SAID = 4000  # characters of each part of a problem


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the field or argument it concerns, why it fails, what to do."""

    field: str
    why: str
    fix: str

    def __post_init__(self) -> None:
        for part in ("field", "why", "fix"):  # which may quote what was given, however long
            object.__setattr__(self, part, clipped(getattr(self, part), MOST_SAID))

    def __str__(self) -> str:
        return f"{self.field}: {self.why}\n    {self.fix}"

    def as_dict(self) -> dict[str, Any]:
        """Returns its three parts as JSON has them."""
        return {"field": self.field, "why": self.why, "fix": self.fix}


class UserError(ValueError):
    """Something that the user passed cannot work. Raised before work starts; the CLI prints it and exits with code
    2."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a UserError names at least one problem"
        self.problems = tuple(dict.fromkeys(problems))  # several data sets may find the same
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[UserError], tuple[Sequence[Problem]]]:
        return UserError, (self.problems,)  # from rank to rank


class RunError(RuntimeError):
    """The run itself failed (a NaN loss, a full disk). The CLI prints it and exits with code 1."""


class OutOfMemory(RunError):
    """A device's memory ran out, in a micro-batch of `samples` samples, or (0) in memory that no smaller micro-batch
    saves. tokens: the most that a micro-batch could have then, if that was bounded."""

    def __init__(self, message: str, samples: int = 0, tokens: int | None = None) -> None:
        super().__init__(message)
        self.samples, self.tokens = samples, tokens


class Stopping(RunError):
    """A signal asked the run to stop while it waited for a step's data. It is not at fault, and saves."""


class Interrupted(Exception):
    """Ctrl-C ended the run before it could save. The CLI says what is left and exits with code 130."""


class PeerError(RunError):
    """Another rank failed; the message has that rank's error."""


class RankError(RuntimeError):
    """A rank failed by an error that is neither a UserError nor a RunError; `traceback` is that rank's."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class _Shown(reprlib.Repr):
    """repr of the beginning of a value, however large the value is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, MOST_SHOWN, MOST_SHOWN
        self.maxdict = self.maxlist = self.maxtuple = 8

    def repr_int(self, value: int, level: int) -> str:  # noqa: ARG002  reprlib's signature
        return repr(value) if value.bit_length() < 1000 else f"an integer of {value.bit_length()} bits"


_SHOWN = _Shown()


def shown(value: Any) -> str:
    """Returns a value as a message quotes it: at most its first MOST_SHOWN characters."""
    return clipped(_SHOWN.repr(value), MOST_SHOWN)


def clipped(text: str, most: int) -> str:
    """Returns the text, or as much of its beginning as fits into `most` characters with an ellipsis."""
    return text if len(text) <= most else text[: most - 3] + "..."


def counted(count: int, noun: str) -> str:
    """Returns a number of things: "1 row", "1,234 rows"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def problem(field: str, why: str, fix: str) -> UserError:
    """Returns a UserError with a single problem."""
    return UserError([Problem(field, why, fix)])


def last_line(error: BaseException) -> str:
    """Returns an error's message as one line: the last of several, since a nested traceback ends with the message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip()[:300]}" if lines else type(error).__name__


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Returns the results of all calls, or raises one UserError with the problems of all."""
    results: list[T] = []
    problems: list[Problem] = []
    for call in calls:
        try:
            results.append(call())
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return results
