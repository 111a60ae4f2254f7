"""The verb chat: a conversation with a model at the terminal."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from drivetrain.cli.arguments import CheckpointOption, ModelPlace, TrustOption, checkpoint_here, path_option
from drivetrain.cli.console import errors, output
from drivetrain.config.location import store_address
from drivetrain.errors import together


def chat(
    place: ModelPlace,
    checkpoint: CheckpointOption = "best",
    compare: Annotated[Path | None, path_option("--compare", help="Another model, asked the same beside it.")] = None,
    system: Annotated[str | None, typer.Option(help="A message that precedes the conversation.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0 takes the likeliest word; left out, the model's own setting.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes drawn answers repeat.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 1024,
    tools: Annotated[Path | None, path_option("--tools", help="Python file with functions it may call.")] = None,
    trust: TrustOption = False,
) -> None:
    """Talk with a model: streamed Markdown, several lines, history, /commands; a pipe is answered line by line."""
    from drivetrain.runtime.model_places import refuse_absent_source

    asked = [(place, checkpoint), *([] if compare is None else [(compare, "best")])]
    here = [(each, of_run) for each, of_run in asked if store_address(each) is None]
    together([functools.partial(refuse_absent_source, str(each), of_run) for each, of_run in here])
    from drivetrain.inference.chat.chat import Chat
    from drivetrain.inference.chat.commands import COMMANDS
    from drivetrain.inference.chat.functions import read_functions
    from drivetrain.inference.chat.lines import history_file, piped_lines, terminal_lines
    from drivetrain.inference.chat.talk import Settings
    from drivetrain.inference.loading import LoadedModel, load_model

    checkpoint = checkpoint_here(checkpoint)
    functions = [] if tools is None else read_functions(tools)
    settings = Settings(system, temperature, seed, max_new_tokens, functions)

    def load(where: str | Path) -> LoadedModel:
        errors.print(f"[dim]loading {escape(str(where))}[/]", soft_wrap=True)
        # a folder is a checkpoint of the first model alone: the other would be the same model again
        chosen = checkpoint if where is place or checkpoint in ("best", "last") else "best"
        return load_model(where, checkpoint=chosen, trust=trust)

    models = [load(each) for each in (place, compare) if each is not None]
    talking = Chat(models, settings, load, output, errors)
    at_terminal = sys.stdin.isatty() and output.is_terminal
    if at_terminal:
        errors.print("[dim]/help lists the commands; Ctrl-D ends[/]")
    answered = talking.run(terminal_lines(history_file(), [*COMMANDS]) if at_terminal else piped_lines())
    raise typer.Exit(0 if answered or at_terminal else 1)
