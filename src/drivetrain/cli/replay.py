"""`drivetrain replay`: prints a repeated step, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from drivetrain.cli.arguments import here
from drivetrain.cli.console import errors, output, wide
from drivetrain.config.files import usable_path
from drivetrain.runtime.strict_json import dumps

if TYPE_CHECKING:
    from drivetrain.replay import Replay

MOST_ROWS = 40
MOST_INDICES = 16
WEIGHTS = "The state before the step is bad already: replay an earlier step, or resume from an earlier checkpoint."
SAMPLES = "Look at the samples named; take them out of the data, or give numerics.skip=true to leave such steps out."
OVERFLOW = (
    "Try precision=fp32 to see whether it is the range of 16 bits; else a lower learning rate, a longer warm-up or "
    "loop.max_grad_norm=1 from an earlier checkpoint."
)
BACKWARD = (
    "Look for a root, a logarithm, a division or a norm at 0 in the modules after it: its value is finite where its "
    "derivative is not. precision=fp32 shows whether the range of 16 bits is the cause."
)


def replay(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False, parser=usable_path)
    ],
    step: Annotated[int, typer.Option(min=1, help="Step to do again, counted from 1.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every module.")] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Run Python that the folder's run.yaml names.")] = False,
) -> None:
    """Repeat one step of a run and show its losses, every layer's numbers, the first layer that is not finite."""
    from drivetrain.replay import replay as replayed

    found = replayed(
        here(folder, [f"before-{step}"]),
        step,
        lambda line: errors.print(f"[dim]{escape(line)}[/]", soft_wrap=True),
        trust,
    )
    if as_json:
        typer.echo(dumps(_values(found), indent=2))
    else:
        show(found, wide(output))


def show(found: Replay, console: Console) -> None:
    for line in lines(found):
        console.print(escape(line), soft_wrap=True)
    console.print(layers_table(found))
    for line in (*_samples(found), *_advice(found)):
        console.print(escape(line), soft_wrap=True)


def lines(found: Replay) -> Iterator[str]:
    numbers = f"loss {found.loss:.8g}, norm {found.grad_norm:.8g}"
    yield f"step {found.step} (epoch {found.epoch}), from {found.start}: {numbers}"
    if not found.same_layout:
        yield "on one process and not compiled: the same batch and weights, but other rounding and dropout masks"
    if found.recorded is not None:
        loss, norm = found.recorded
        same = "the same to the bit" if found.repeated else "not the same to the bit"
        yield f"the run wrote down loss {loss:.8g}, norm {norm:.8g}: {same}"
    shown = ", ".join(f"{loss:.6g}" for loss in found.inspection.losses)
    yield f"loss of each micro-batch: {shown}"
    culprit = found.inspection.culprit
    if culprit is not None:
        where = found.inspection.micro_batch
        yield str(culprit) + ("" if where is None else f", in micro-batch {where + 1}")
    elif not found.is_finite:
        yield "all outputs of modules are finite: it is the loss itself that is not"
    else:
        yield "every number is finite"


def layers_table(found: Replay) -> Table:
    """Returns layers in the order of the forward pass; if there are many, those that are not finite, then those with
    large numbers."""
    layers = list(found.inspection.layers.values())
    chosen = sorted(layers, key=_weight, reverse=True)[:MOST_ROWS]
    columns = ("largest output", "not finite", "largest gradient", "not finite")
    table = Table(Column("module", overflow="fold"), "type", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for layer in sorted(chosen, key=lambda each: each.order):
        counts = (layer.not_finite, layer.not_finite_gradients)
        first, second = (f"[bold red]{count:,}[/]" if count else "0" for count in counts)
        sizes = (f"{layer.largest:.4g}", first, f"{layer.largest_gradient:.4g}", second)
        table.add_row(escape(layer.name), layer.kind, *sizes)
    if len(layers) > len(chosen):
        table.caption = f"{len(chosen)} of {len(layers)} modules; --json has all"
    return table


def _weight(layer: Any) -> tuple[bool, float]:
    return bool(layer.not_finite or layer.not_finite_gradients), max(layer.largest, layer.largest_gradient)


def _samples(found: Replay) -> Iterator[str]:
    if found.made_at is not None:
        yield f"samples are numbered from 0 among those that the model made after step {found.made_at} (samples.jsonl)"
    for number, piece in enumerate(found.micro_batches, 1):
        more = f" and {len(piece) - MOST_INDICES} more" if len(piece) > MOST_INDICES else ""
        yield f"samples of micro-batch {number}: {', '.join(map(str, piece[:MOST_INDICES]))}{more}"
    if found.guilty:
        yield f"not finite by themselves: {', '.join(map(str, found.guilty[:MOST_INDICES]))}"
    elif found.guilty is not None:
        yield "each sample of that micro-batch has a finite loss by itself, evaluated"
    for index, text in found.shown.items():
        yield f"sample {index}: {text}"


def _advice(found: Replay) -> Iterator[str]:
    if found.is_finite:
        return
    if found.inspection.weight is not None:
        yield WEIGHTS
        return
    if found.guilty and found.inspection.micro_batch is not None:
        piece = found.micro_batches[found.inspection.micro_batch]
        if len(found.guilty) < len(piece):
            yield SAMPLES
            return
    yield OVERFLOW if found.inspection.output is not None else BACKWARD


def _values(found: Replay) -> dict[str, Any]:
    values = asdict(found)
    values["inspection"]["layers"] = list(values["inspection"]["layers"].values())
    return {**values, "repeated": found.repeated, "advice": list(_advice(found))}
