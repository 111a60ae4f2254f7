"""A run file with made data, for a plan of a run whose data are not there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from drivetrain.config.axes import choices, read_axes
from drivetrain.config.files import read_yaml
from drivetrain.config.load import load
from drivetrain.config.workload_block import WorkloadBlock
from drivetrain.errors import UserError, problem
from drivetrain.plan.samples import standing_for
from drivetrain.runtime import scratch

MOST_TOKENS, FEWEST = 2**18, 8  # tokens to make, or so many samples where these have more
FILES = ("train", "evaluation")  # keys of `data` that name one


@contextmanager
def with_made_data(
    run_file: Path, samples: int | None, length: int | None, arguments: Sequence[str] = ()
) -> Iterator[Path]:
    """Yields a run file whose data are made ones, which stand for `samples` of `length` tokens; the same file where
    neither is given.

    arguments: overrides and axes, with which the run file is planned. Raises UserError for one number without the
    other, for a workload whose data cannot be made, and for axes whose ways read different data.
    """
    if samples is None and length is None:
        yield run_file
        return
    if samples is None or length is None:
        missing = "--samples" if samples is None else "--length"
        raise problem(missing, "is needed too: both stand for data that are not there", "give both")
    blocks = _blocks(run_file, arguments)
    for block in blocks:
        if not block.MADE_DATA:
            why = f"stands for the data of texts and language models, and this run's workload is {block.type}"
            fix = "put the data where the run file says, and leave --samples and --length out"
            raise problem("--samples", why, fix)
    with scratch.make() as folder:  # whose leftovers, after a kill, the next one deletes
        made = [_made(block, folder / str(number), samples, length) for number, block in enumerate(blocks)]
        if any(_content(each) != _content(made[0]) for each in made[1:]):
            why = "makes data for one kind of training, and the ways that are named read different ones"
            raise problem("--samples", why, "plan each training stage and form of data by itself")
        raw = read_yaml(run_file)
        raw["workload"] = {**raw["workload"], "data": made[0]}
        file = folder / run_file.name
        file.write_text(json.dumps(raw))
        with standing_for(samples):
            yield file


def _blocks(run_file: Path, arguments: Sequence[str]) -> list[Any]:
    """Returns the different workload blocks of the ways that are named."""
    found: dict[str, WorkloadBlock] = {}
    for choice in choices(*read_axes(arguments)):
        run, problems = load(run_file, choice.overrides)
        if run is None:
            raise UserError(problems)
        found.setdefault(run.workload.model_dump_json(), run.workload)
    return [*found.values()]


def _made(block: Any, folder: Path, samples: int, length: int) -> dict[str, Any]:
    """Writes a few samples, from which as many are taken as are wanted. Returns the block's `data` that reads them."""
    folder.mkdir()
    module, _, function = block.MADE_DATA.partition(":")
    few = min(samples, max(MOST_TOKENS // length, FEWEST))
    found: dict[str, Any] = getattr(import_module(module), function)(block, folder, few, length)
    return found


def _content(made: dict[str, Any]) -> list[Any]:
    """Returns what decides the samples: the keys of `data`, with the text of a file in place of its path."""
    return [(key, Path(value).read_text() if key in FILES else value) for key, value in sorted(made.items())]
