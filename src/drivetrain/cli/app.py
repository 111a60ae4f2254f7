"""The command line: a table of its verbs. A verb's function is in a file of its own, and imports torch when it is
called, so that --help is instant."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, Any

import typer

from drivetrain.cli.arguments import example
from drivetrain.cli.program import Program
from drivetrain.runtime.library_messages import VERBOSE, hush

CODES = "Exit codes: 0 done, 1 failed while running, 2 refused before any work, 130 / 143 saved after Ctrl-C / SIGTERM."

VERBS: dict[str, tuple[str, ...]] = {  # verb -> its file and function in this folder, then its examples, as typed
    "train": (
        "train:train",
        "drivetrain train run.yaml",
        "drivetrain train run.yaml engine=ddp processes=4 precision=bf16-mixed",
        "drivetrain train run.yaml --resume",
    ),
    "check": ("check:check", "drivetrain check run.yaml", "drivetrain check run.yaml engine=fsdp --json"),
    "evaluate": (
        "evaluate:evaluate",
        "drivetrain evaluate run.yaml --checkpoint last",
        "drivetrain evaluate runs/one runs/two --data reviews.csv --data hotels.csv",
    ),
    "predict": (
        "predict:predict",
        "drivetrain predict run.yaml -o predictions.csv",
        'drivetrain predict run.yaml --text "Good."',
    ),
    "chat": ("chat:chat", "drivetrain chat runs/mine", "drivetrain chat runs/mine --compare runs/other"),
    "serve": ("serve:serve", "drivetrain serve runs/mine", "drivetrain serve runs/mine --port 0 --key-file keys.txt"),
    "board": ("board:board", "drivetrain board", "drivetrain board --runs runs --data data --port 0"),
    "compare": (
        "compare:compare",
        "drivetrain compare run.yaml precision=fp32,bf16-mixed engine=single,ddp --seeds 5",
    ),
    "plan": (
        "plan:plan",
        "drivetrain plan run.yaml",
        "drivetrain plan run.yaml --machine 8xH100-80GB --price 2.5 --output plan",
        "drivetrain plan run.yaml --machine 8xH100-80GB --samples 50000 --length 2048",
        "drivetrain plan run.yaml engine=ddp,fsdp,zero3 precision=fp32,bf16-mixed --machine 4xP40",
    ),
    "profile": (
        "profile:profile",
        "drivetrain profile run.yaml",
        "drivetrain profile run.yaml engine=fsdp processes=2 --steps 10 --try",
    ),
    "report": (
        "report:report",
        "drivetrain report runs/one runs/two --output page",
        "drivetrain report runs/one --output one.html",
    ),
    "data": ("data:data", "drivetrain data run.yaml data.max_length=256", "drivetrain data run.yaml --rows 3"),
    "prove": ("prove:prove", "drivetrain prove run.yaml engine=fsdp processes=2"),
    "launch": (
        "launch:launch",
        "drivetrain launch --slurm run.yaml engine=fsdp processes=8 --nodes 2 > job.sbatch",
        "drivetrain launch --kubernetes run.yaml processes=8 --image drivetrain:1 --volume runs:/runs > job.yaml",
    ),
    "calibrate": ("calibrate:calibrate", "drivetrain calibrate", "drivetrain calibrate --show --json"),
    "version": ("version:version", "drivetrain version"),
    "export": ("export:export", "drivetrain export runs/mine --to transformers --dtype bf16 --output mine"),
    "schema": ("schema:schema", "drivetrain schema > run.schema.json"),
    "import": ("import_verb:import_", "drivetrain import qwen_lora_sft.yaml --output run.yaml"),
    "replay": ("replay:replay", "drivetrain replay runs/digits --step 40"),
    "fields": ("fields:fields", "drivetrain fields", "drivetrain fields optimizer schedule"),
    "init": ("init:init", "drivetrain init", "drivetrain init --data hotels.csv", "drivetrain init linear"),
    "recipes": ("recipes:recipes", "drivetrain recipes"),
    "doctor": ("doctor:doctor", "drivetrain doctor", "drivetrain doctor runs/digits --bundle"),
    "cache": ("cache:cache", "drivetrain cache", "drivetrain cache --unused-days 30 --most-gb 50"),
}
GROUPS = {"checkpoint": "checkpoint:checkpoint"}  # verbs with verbs of their own, which hold their examples


def app_of(words: Iterable[str]) -> typer.Typer:
    """Returns the program for a command line: with the verb that it begins with, or with every verb where it begins
    with none of them, as for --help. A verb's file and its options take time to load, which no other verb pays."""
    verb = next((word for word in words if not word.startswith("-")), "")
    return _program_of((verb,) if verb in {*VERBS, *GROUPS} else (*VERBS, *GROUPS))


@functools.cache
def _program_of(verbs: tuple[str, ...]) -> typer.Typer:
    made = Program(
        help=f"Train a PyTorch model under any precision and engine from one run file.\n\n{CODES}",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        rich_markup_mode="rich",
        epilog=example(
            "drivetrain train run.yaml", "drivetrain train run.yaml --resume", "drivetrain predict run.yaml -o rows.csv"
        ),
    )
    made.callback()(_program)
    for verb in verbs:
        if verb in GROUPS:
            made.add_typer(_found(GROUPS[verb]), name=verb)
        else:
            place, *examples = VERBS[verb]
            made.command(verb, epilog=example(*examples))(_found(place))
    return made


def _program(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show libraries' own messages.")] = False,
) -> None:
    if verbose:
        os.environ[VERBOSE] = "1"
    hush()


def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"drivetrain.cli.{module}"), name)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return app_of(())
