"""`drivetrain checkpoint`: looks into one, verifies it, converts it to and from other software's formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from drivetrain.cli.arguments import example, here, note_repeated, path_argument, path_option, run_file_here
from drivetrain.cli.console import errors, print_notices, wide
from drivetrain.cli.console import output as screen
from drivetrain.cli.program import Program
from drivetrain.runtime.strict_json import dumps

if TYPE_CHECKING:
    from drivetrain.checkpoint.convert.foreign import Note

checkpoint = Program(
    help="Look into checkpoints, verify them, convert them.",
    no_args_is_help=True,
    epilog=example("drivetrain checkpoint inspect runs/digits", "drivetrain checkpoint verify runs/digits"),
)

Folder = Annotated[Path, path_argument(metavar="PATH", help="A folder step-..., or a run's.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="With --run: overrides.", callback=note_repeated)
]


@checkpoint.command(epilog=example("drivetrain checkpoint inspect runs/digits"))
def inspect(path: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what is in a checkpoint; for a run, in its newest."""
    from drivetrain.checkpoint.convert.contents import contents
    from drivetrain.checkpoint.convert.own_format import find

    newest, skipped = find(here(path, ["last"], "PATH"))
    for why in skipped:
        errors.print(f"[yellow]note[/] skipped {escape(why)}", soft_wrap=True)
    found = contents(newest)
    if as_json:
        typer.echo(dumps(found, indent=2))
    else:
        show(found, wide(screen))


@checkpoint.command(epilog=example("drivetrain checkpoint verify runs/digits"))
def verify(path: Folder) -> None:
    """Check every file against its checksum; for a run, in each checkpoint. Exit code 1 if one is bad."""
    from drivetrain.checkpoint import run_state
    from drivetrain.checkpoint.convert.own_format import all_of

    bad, path = 0, here(path, ["all"], "PATH")
    for each in all_of(path):
        wrong = run_state.verify(each)
        if wrong and not each.exists() and each != path:
            continue  # a run that goes on deleted it meanwhile
        bad += bool(wrong)
        typer.echo(f"{each}: {'; '.join(wrong) or 'good'}")
    raise typer.Exit(1 if bad else 0)


@checkpoint.command(
    epilog=example(
        "drivetrain checkpoint convert runs/digits --to dcp --output FOLDER",
        "drivetrain checkpoint convert runs/lora --to transformers --merge --output FOLDER",
    )
)
def convert(
    path: Annotated[Path, path_argument(metavar="PATH", help="Checkpoint or run; with --run, others' folder.")],
    overrides: Overrides = None,
    to: Annotated[str | None, typer.Option(help="transformers, dcp, deepspeed or accelerate.")] = None,
    output: Annotated[Path | None, path_option("--output", "-o", help="With --to: a new folder.")] = None,
    dtype: Annotated[str | None, typer.Option(help="With --to transformers: fp32, bf16 or fp16.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="With --to transformers: adapters merged into their base.")
    ] = False,
    from_: Annotated[str | None, typer.Option("--from", help="Format of PATH; left out, what it looks like.")] = None,
    run: Annotated[
        Path | None,
        path_option(metavar="RUN.YAML", help="Put others' checkpoint into this run's folder."),
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="With --run: the step that it is of.")] = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="With --run: no optimizer's states.")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="With --run or --merge: run Python that a run's run.yaml names.")
    ] = False,
) -> None:
    """Convert to another software's format, or from it, and list what became of each part."""
    if (to is None) == (run is None):
        raise typer.BadParameter("give --to FORMAT --output FOLDER, or --run RUN.YAML")
    path, run = here(path, ["last"], "PATH"), None if run is None else run_file_here(run, "--run")
    if to is not None:
        if output is None or overrides or from_ or step is not None or weights_only:
            raise typer.BadParameter("--to takes --output FOLDER, and --dtype")
        source, notes = _converted(path, to, output, dtype, merge, trust)
        show_notes(notes)
        errors.print(f"{escape(str(source))} as {to} in {escape(str(output))}", soft_wrap=True)
        return
    if output is not None or dtype is not None or merge:
        raise typer.BadParameter("--run takes --from, --step, --weights-only and overrides")
    from drivetrain.checkpoint.convert.from_others import convert_from
    from drivetrain.config.load import replaced

    assert run is not None
    found, made, notes = convert_from(path, from_, run, overrides or [], step, weights_only, trust)
    print_notices(replaced(run, overrides or []))
    show_notes(notes)
    go_on = " ".join(["drivetrain train", str(run), *(overrides or []), "--resume"])
    errors.print(f"{found} in {escape(str(made))}; go on with {escape(go_on)}", soft_wrap=True)


def _converted(
    path: Path, to: str, output: Path, dtype: str | None, merge: bool, trust: bool
) -> tuple[Path, list[Note]]:
    if not merge:
        from drivetrain.checkpoint.convert.to_others import convert_to

        return convert_to(path, to, output, dtype)
    if to != "transformers":
        raise typer.BadParameter("--merge goes with --to transformers")
    from drivetrain.checkpoint.convert.merging import merge_to

    return merge_to(path, output, dtype, trust)


# --- for the eye -----------------------------------------------------------------------------------------------------


def show_notes(notes: Sequence[Note]) -> None:
    """Prints the parts that were carried over, then those that were not; as columns, or for files and pipes one line
    each with tabs."""
    ranked = sorted(notes, key=lambda note: not note.carried)
    if not screen.is_terminal:
        for note in ranked:
            typer.echo(f"{'carried' if note.carried else 'left'}\t{note.item}\t{note.what}")
        return
    table = Table("", "part", Column("what became of it", overflow="fold"), box=None, pad_edge=False)
    for note in ranked:
        table.add_row("carried" if note.carried else "[yellow]left[/]", escape(note.item), escape(note.what))
    screen.print(table)


def show(found: dict[str, Any], console: Console) -> None:
    facts = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _facts(found):
        facts.add_row(name, escape(value))
    console.print(facts)
    columns = [Column("numbers", justify="right"), Column("bytes", justify="right")]
    table = Table("part", Column("tensors", justify="right"), *columns, "of which", box=None, pad_edge=False)
    for name, part in found["parts"].items():
        kinds = ", ".join(f"{kind} {_size(each['bytes'])}" for kind, each in part["by_dtype"].items())
        table.add_row(name, f"{part['tensors']:,}", f"{part['numbers']:,}", _size(part["bytes"]), kinds)
    console.print(table)
    for name in ("model", "optimizer"):
        for each in found["parts"].get(name, {}).get("largest", []):
            shape = " x ".join(map(str, each["shape"])) or "one number"
            line = f"{name}: {each['name']}, {shape}, {each['dtype']}, {_size(each['bytes'])}"
            console.print(escape(line), soft_wrap=True)


def _facts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    progress = found["progress"]
    yield "checkpoint", found["path"]
    yield "step", _step(found["step"], progress)
    yield "run", f"{found.get('run', '?')}, engine {found.get('engine', '?')}, {found.get('precision', '?')}"
    if "metric" in found:
        yield "metric", f"{found.get('metric_name', 'metric')} {found['metric']:.6g}"
    optimizer = found["optimizer"]
    yield "optimizer", str(optimizer["name"])
    for group in optimizer["groups"]:
        shown = {key: value for key, value in group.items() if key in ("lr", "weight_decay", "momentum", "betas")}
        arguments = ", ".join(f"{key} {value}" for key, value in shown.items())
        yield "  group", f"{group['parameters']} parameters: {arguments}"
    for key, forms in optimizer["states"].items():
        yield "  state", f"{key}: {', '.join(f'{form} ({count})' for form, count in forms.items())}"
    yield "random streams", ", ".join(map(str, found["random_streams"]))
    if found["loss_scale"] is not None:
        yield "loss scale", f"{found['loss_scale']:g}"
    if found["adapters"]:
        yield "adapters", f"PEFT's files in {', '.join(found['adapters'])}"
    yield "files", ", ".join(f"{name} {_size(size)}" for name, size in found["files"].items())


def _step(step: int, progress: dict[str, Any]) -> str:
    counts = [f"{step:,}"]
    if progress["updates"] is not None and progress["updates"] != step:
        counts.append(f"{progress['updates']:,} updates")
    if progress["samples"] is not None:
        counts.append(f"{progress['samples']:,} samples")
    if progress["epochs"] is not None:
        counts.append(f"{progress['epochs']:.4g} epochs")
    return ", ".join(counts)


def _size(size: int) -> str:
    return f"{size:,} B" if size < 2**10 else f"{size / 2**10:,.1f} KiB" if size < 2**20 else f"{size / 2**20:,.1f} MiB"
