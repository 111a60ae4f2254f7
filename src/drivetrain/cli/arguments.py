"""Arguments and options that verbs of the command line share, and the examples in their help."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from drivetrain.cli.console import print_notices
from drivetrain.config.files import usable_path
from drivetrain.config.location import store_address

# of a file or folder, which it refuses to take from a text that is no path
path_argument = functools.partial(typer.Argument, parser=usable_path)
path_option = functools.partial(typer.Option, parser=usable_path)


def note_repeated(overrides: list[str] | None) -> list[str] | None:
    """Prints a note for each override that a later one makes void; of several ranks the first one prints it."""
    if overrides and len(overrides) > 1:
        from drivetrain.config.repeated_overrides import without_effect
        from drivetrain.launch.external_launcher import OuterLauncher

        outer = OuterLauncher.here()
        if outer is None or outer.rank == 0:
            print_notices(without_effect(overrides))
    return overrides


RunFile = Annotated[Path, path_argument(metavar="RUN.YAML", help="Run file.", show_default=False)]
RunPlace = Annotated[Path, path_argument(metavar="RUN", help="Run file, or the folder of a run.", show_default=False)]
ModelPlace = Annotated[
    Path,
    path_argument(
        metavar="MODEL",
        help="Folder of a run, a checkpoint, an adapter or a Transformers model; or a run file.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides, e.g. precision=bf16-mixed lr=3e-4.", callback=note_repeated),
]
CheckpointOption = Annotated[str, typer.Option("--checkpoint", help="best, last, or a checkpoint folder.")]
TrustOption = Annotated[bool, typer.Option("--trust", help="Run Python that the run.yaml of a run's folder names.")]
NodesOption = Annotated[
    int | None,
    typer.Option("--nodes", min=1, help="Machines, each of which starts this command, and `processes` ranks."),
]
NodeRankOption = Annotated[int, typer.Option("--node-rank", min=0, help="Which of them this one is, from 0.")]
RayOption = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help="Start the ranks on a Ray cluster: auto, or HOST:PORT of its head."),
]
RendezvousOption = Annotated[str | None, typer.Option("--rendezvous", help="HOST:PORT of the first of them.")]


def here(place: Path, checkpoints: Sequence[str] = (), field: str = "RUN") -> Path:
    """Returns this machine's copy of what an address in a store names, or the path itself. checkpoints: of a run."""
    if store_address(place) is None:
        return place
    from drivetrain.inference.remote_places import here as copied

    return copied(place, checkpoints, field)


def run_file_here(place: Path, field: str = "RUN.YAML") -> Path:
    """Does the same for a run file. The address of a run that was mirrored there stands for its run.yaml."""
    if store_address(place) is None:
        return place
    from drivetrain.inference.remote_places import run_file_here as copied

    return copied(place, field)


def checkpoint_here(checkpoint: str) -> str:
    """Returns best, last or a folder of this machine: the copy of a checkpoint that is named by its address."""
    if store_address(checkpoint) is None:
        return checkpoint
    from drivetrain.inference.remote_places import checkpoint_here as copied

    return copied(checkpoint)


def as_typed(place: Path) -> str:
    """Returns a path, or an address of a store with both of its slashes, of which a path keeps one."""
    return store_address(place) or str(place)


def was_given(context: typer.Context, name: str) -> bool:
    """Returns whether an option was given, on the command line or by a variable, and not left to its default."""
    source = context.get_parameter_source(name)  # an enumeration of click's, which typer may bring along itself
    return source is not None and source.name != "DEFAULT"


def example(*commands: str) -> str:
    """Return the end of a verb's help: commands as a user types them."""
    return "Examples:\n\n" + "\n\n".join(f"  {command}" for command in commands)
