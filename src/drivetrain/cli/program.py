"""The class of the program and that of its verbs, which refuse an option or an override that takes one value and is
given twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from drivetrain.config.files import path_exists
from drivetrain.errors import Problem, UserError


class Verb(TyperCommand):
    """Refuses a repeated option of one value, of which Click silently takes the last one, and a repeated override."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if problems := [*self._repeated(ctx, args)]:
            raise UserError(problems)
        return super().parse_args(ctx, args)

    def _repeated(self, ctx: Any, args: list[str]) -> Iterator[Problem]:
        """Yields a problem for each: with all of its values, which a parser keeps of options that may be repeated."""
        parameters = self.get_params(ctx)
        single = [each for each in parameters if isinstance(each, TyperOption) and _takes_one(each)]
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
        for argument in parameters:
            if isinstance(argument, TyperArgument) and _takes_overrides(argument):
                yield from _repeated_overrides(given.get(argument.name) or ())


def _repeated_overrides(given: Sequence[str]) -> Iterator[Problem]:
    """Yields a problem for each field that several overrides give. given: also places, among which a file's name may
    have a = too."""
    overrides = [text for text in given if "=" in text and not path_exists(text)]
    if len({text.partition("=")[0].rpartition(".")[2] for text in overrides}) < len(overrides):
        from drivetrain.config.repeated_overrides import repeated_fields  # with pydantic, which takes long to import

        yield from repeated_fields(overrides)


def _takes_overrides(argument: TyperArgument) -> bool:
    """Returns whether these are KEY=VALUE. Axes, KEY=VALUE,VALUE, have a reader of their own."""
    return (argument.metavar or "").strip("[].").endswith("KEY=VALUE")


def _takes_one(option: TyperOption) -> bool:
    return not (option.multiple or option.is_flag or option.count)


class Program(typer.Typer):
    """A program whose verbs are of the class above."""

    def command(self, name: str | None = None, **given: Any) -> Callable[[Any], Any]:
        return super().command(name, **{"cls": Verb, **given})
