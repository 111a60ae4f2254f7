"""The class of the program and that of its verbs, which refuse an option that takes one value and is given twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

from drivetrain.errors import Problem, UserError


class Verb(TyperCommand):
    """Refuses a repeated option of one value, of which Click silently takes the last one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if problems := [*self._repeated(ctx, args)]:
            raise UserError(problems)
        return super().parse_args(ctx, args)

    def _repeated(self, ctx: Any, args: list[str]) -> Iterator[Problem]:
        """Yields a problem for each: with all of its values, which a parser keeps of options that may be repeated."""
        single = [each for each in self.get_params(ctx) if isinstance(each, TyperOption) and _takes_one(each)]
        for option in single:
            option.multiple = True
        try:
            given, _, _ = self.make_parser(ctx).parse_args(args=[*args])
        finally:
            for option in single:
                option.multiple = False
        for option in single:
            values = given.get(option.name) or []
            if len(values) > 1:
                why = f"it takes one value, and {len(values)} were given: {', '.join(map(str, values))}"
                yield Problem(option.opts[0], why, "give one of them here, and a command of its own for each other one")


def _takes_one(option: TyperOption) -> bool:
    return not (option.multiple or option.is_flag or option.count)


class Program(typer.Typer):
    """A program whose verbs are of the class above."""

    def command(self, name: str | None = None, **given: Any) -> Callable[[Any], Any]:
        return super().command(name, **{"cls": Verb, **given})
