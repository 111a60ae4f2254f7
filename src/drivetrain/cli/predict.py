"""The verb predict: predictions of a checkpoint, a row a sample."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from drivetrain.cli.arguments import (
    CheckpointOption,
    Overrides,
    RunPlace,
    TrustOption,
    checkpoint_here,
    here,
    path_option,
)
from drivetrain.cli.console import errors
from drivetrain.cli.jobs import start_job
from drivetrain.errors import problem


def predict(
    run_file: RunPlace,
    overrides: Overrides = None,
    checkpoint: CheckpointOption = "best",
    data: Annotated[
        str | None, typer.Option(help="Data to predict for: a file or folder; - reads texts from stdin, one a line.")
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="A text to predict for; may be given several times.")] = None,
    to: Annotated[Path | None, path_option("--output", "-o", help="File .jsonl or .csv; left out, the screen.")] = None,
    llama_factory: Annotated[
        Path | None,
        path_option("--llama-factory", help="Folder for LLaMA-Factory's generated_predictions.jsonl and results."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Discard what another, interrupted prediction left for the file.")
    ] = False,
    trust: TrustOption = False,
) -> None:
    """Predict with a checkpoint, one row a sample, in order: for the evaluation data, or for data that you name.

    What a kill or Ctrl-C left of a .jsonl is continued by the same command.
    """
    from drivetrain.inference.request import asked_for
    from drivetrain.launch.prepare import checked_place

    data, texts = asked_for(data, text or [])
    if llama_factory is not None and to is None:
        from drivetrain.inference.llama_factory_files import ROWS

        to = llama_factory / ROWS
    if overwrite and to is None:
        raise problem(
            "--overwrite", "predictions are printed, which replaces nothing", "give --output, or leave it out"
        )
    checkpoint = checkpoint_here(checkpoint)
    run_file = here(run_file, [checkpoint])
    ready = checked_place(run_file, overrides or [], checkpoint=checkpoint, data=data, output=to, trust=trust)
    if llama_factory is not None and to is not None:
        from drivetrain.inference.llama_factory_files import check_request

        check_request(ready.run, to, bool(texts))
    begun = time.monotonic()
    result = start_job(
        ready, verb="predict", checkpoint=checkpoint, data=data, texts=texts, output=to, overwrite=overwrite
    )
    if result.of_first and to is not None and llama_factory is not None:
        from drivetrain.inference.llama_factory_files import write_files

        results = write_files(to, llama_factory, ready.run, time.monotonic() - begun)
        if "predict_bleu-4" not in results:
            errors.print("[yellow]note[/] no row has a reference to compare with: there are no scores", soft_wrap=True)
    if result.of_first and to is not None:
        errors.print(f"{result.value:,} prediction{'s' * (result.value != 1)} in {escape(str(to))}", soft_wrap=True)
