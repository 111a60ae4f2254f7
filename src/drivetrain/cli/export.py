"""The verb export: a run's model in the formats of other software, verified."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from drivetrain.cli.arguments import checkpoint_here, path_argument, path_option
from drivetrain.cli.console import errors
from drivetrain.cli.console import output as screen
from drivetrain.config.location import store_address
from drivetrain.runtime.strict_json import dumps

if TYPE_CHECKING:
    from drivetrain.export.verification import Verdict


def export(
    place: Annotated[
        Path,
        path_argument(metavar="RUN", help="Folder of a run or of its checkpoint, or a run file.", show_default=False),
    ],
    to: Annotated[str, typer.Option("--to", help="transformers, peft, onnx, torch-export or gguf.")],
    output: Annotated[Path, path_option("--output", "-o", help="A new folder.")],
    checkpoint: Annotated[str, typer.Option(help="best, last, or a checkpoint folder.")] = "best",
    dtype: Annotated[str | None, typer.Option(help="Of the weights: fp32, bf16 or fp16.")] = None,
    quantise: Annotated[
        str | None, typer.Option(help="Weights in few bits: int8, fp8, int4, nf4; gguf: q8_0, q5_0, q4_0.")
    ] = None,
    shard_size: Annotated[str | None, typer.Option(help="Largest file of weights (transformers), e.g. 2GB.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Evaluation samples to compare.")] = 16,
    accept: Annotated[
        bool, typer.Option("--accept", help="Keep an export over its bound; the card says so, with the numbers.")
    ] = False,
    license_: Annotated[
        str | None, typer.Option("--license", help="The licence for the card, e.g. apache-2.0.")
    ] = None,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="OWNER/NAME", help="Upload it to this private repository of a hub."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="A repository that --push makes is visible to all.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print export.json.")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run Python that the run.yaml of a run's folder names.")
    ] = False,
) -> None:
    """Write a run's model for other software. It counts once that software has loaded it and answers as the run
    does."""
    from drivetrain.config.load import load
    from drivetrain.errors import UserError, problem
    from drivetrain.export.exporting import RefusedExport
    from drivetrain.export.exporting import export as exported
    from drivetrain.export.publishing import Hub
    from drivetrain.export.request import Request
    from drivetrain.inference.remote_places import here
    from drivetrain.launch.prepare import run_file_of
    from drivetrain.runtime.run_folder import refuse_code_of_folders, run_around

    resolved = place.expanduser().resolve()
    if store_address(place) is None and (around := run_around(resolved)) is not None:  # the place is a checkpoint
        place, checkpoint = around.path, str(resolved)
    checkpoint = checkpoint_here(checkpoint)
    run_file, overrides = run_file_of(here(place, [checkpoint]), [])
    run, problems = load(run_file, overrides)
    if run is None or problems:
        raise UserError(problems)
    refuse_code_of_folders(run, run_file, trust)
    request = Request(
        format=to,
        output=output,
        checkpoint=checkpoint,
        dtype=dtype,
        quantise=quantise,
        shard_size=shard_size,
        samples=samples,
        accept=accept,
        license=license_,
        trust=trust,
    )
    if public and push is None:
        raise problem("--public", "nothing is uploaded", "give --push OWNER/NAME too, or leave it out")
    hub = None if push is None else Hub(push, public)  # before hours of work
    try:
        done = exported(run, request, lambda line: errors.print(f"[dim]{escape(line)}[/]", soft_wrap=True))
    except RefusedExport as refusal:
        _show(refusal.verdict, errors)
        raise
    if as_json:
        typer.echo(dumps(done.report, indent=2))
    else:
        _show(done.verdict, screen)
    _print_end(done.report, done.folder)
    if hub is not None:
        errors.print(escape(f"uploaded: {hub.upload(done.folder)}"), soft_wrap=True)


def _show(verdict: Verdict, console: Console) -> None:
    from drivetrain.export.verification_rows import rows

    table = Table("", Column("run", justify="right"), Column("export", justify="right"), box=None, pad_edge=False)
    for row in rows(verdict):
        table.add_row(*map(escape, row))
    console.print(table)


def _print_end(report: dict[str, Any], folder: Path) -> None:
    for note in report["notes"]:
        errors.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
    if report["failures"]:
        errors.print(f"[yellow]accepted over its bound:[/] {escape('; '.join(report['failures']))}", soft_wrap=True)
    size = report["bytes"]
    sizes = f"{size['after']:,} bytes (the run's model {size['before']:,})"
    verdict = "kept without passing" if report["failures"] else "verified"
    line = f"{verdict}: {report['format']}, {report['numbers']}, {sizes} in {folder}"
    errors.print(escape(line), soft_wrap=True)
