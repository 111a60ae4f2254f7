"""Turns `key=a,b other=1,2` into the cells of a matrix, each a full list of overrides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drivetrain.config.load import resolve_key
from drivetrain.errors import Problem, UserError, problem

OPENING, CLOSING = "[{", "]}"


@dataclass(frozen=True)
class Axis:
    key: str  # as the user wrote it
    values: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """One cell's position in the matrix: a value of every axis, and the overrides that make it."""

    values: tuple[str, ...]
    overrides: tuple[str, ...]

    @property
    def label(self) -> str:
        return ", ".join(self.values) or "as it is"


def read_axes(arguments: Sequence[str]) -> tuple[list[str], list[Axis]]:
    """Overrides with one value stay overrides; those with several, split at commas, are axes.

    Commas within brackets, braces or quotes do not split. Raises UserError with all problems: a repeated key, a
    repeated value, an empty value, an unknown key.
    """
    fixed: list[str] = []
    axes: list[Axis] = []
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        try:
            if not equals or not key:
                raise problem(argument, "is no axis", "write key=value or key=value,value, e.g. precision=fp32,bf16")
            path = ".".join(resolve_key(key))
            if path in seen:
                raise problem(key, f"was given twice ({seen[path]} and {argument})", "give all its values at once")
            seen[path] = argument
            values = split(text)
            if len(values) == 1:
                fixed.append(argument)
            else:
                axes.append(Axis(key, _distinct(key, values)))
        except UserError as error:
            problems.extend(error.problems)
    if problems:
        raise UserError(problems)
    return fixed, axes


def choices(fixed: Sequence[str], axes: Sequence[Axis]) -> Iterator[Choice]:
    """Yields every combination, the last axis varying fastest; without axes the run unchanged."""
    for values in itertools.product(*(axis.values for axis in axes)):
        chosen = (f"{axis.key}={value}" for axis, value in zip(axes, values, strict=True))
        yield Choice(values, (*fixed, *chosen))


def split(text: str) -> list[str]:
    """Splits at commas outside brackets, braces and quotes; strips white space around the parts."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and not parts[-1].strip():
            quote = character  # only at the start of a value: an apostrophe inside a word is none
        elif character in OPENING:
            depth += 1
        elif character in CLOSING:
            depth -= 1
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _distinct(key: str, values: Sequence[str]) -> tuple[str, ...]:
    if "" in values:
        raise problem(key, f"one of its values is empty ({','.join(values)})", "give values between the commas")
    twice = next((value for i, value in enumerate(values) if value in values[:i]), None)
    if twice is not None:
        raise problem(key, f"{twice} was given twice", "give each value once; --seeds repeats cells")
    return tuple(values)
