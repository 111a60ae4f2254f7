"""Every verb takes its own defaults: one that a parser refuses would end the verb where no option is given."""

from __future__ import annotations

import pytest
from typer.main import get_command

from drivetrain.cli.app import app

COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_verb_takes_the_defaults_of_its_options(verb: str) -> None:
    command = COMMANDS[verb]
    context = command.make_context(verb, [], resilient_parsing=True)
    for parameter in command.params:
        default = parameter.get_default(context)
        if default is not None:
            parameter.process_value(context, default)
