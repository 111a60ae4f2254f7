"""Examines a run's data: what the workload reports of them, and what `train` would refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from drivetrain.cli.data_report import REFUSED, SAMPLES, Report
from drivetrain.config.bad_rows import BadRows, most_dropped
from drivetrain.config.run import RunConfig
from drivetrain.config.workload_block import WorkloadBlock
from drivetrain.data.bad_rows import allowance, exceeds
from drivetrain.errors import Problem, UserError, problem
from drivetrain.runtime.strict_json import dumps

if TYPE_CHECKING:
    from drivetrain.workloads.base import Workload

STATES = {
    "same": "holds what was read",
    "changed": "was changed since it was read, without its size or time; the next start reads it anew",
    "not known": "was not read as it is now; the next start reads it",
}


@dataclass(frozen=True)
class Wanted:
    """Samples to show: so many from a place on, of the training or of the evaluation data."""

    count: int = 0
    first: int = 0
    of_evaluation: bool = False


def examine(run: RunConfig, wanted: Wanted | None = None) -> tuple[dict[str, Any], list[str]]:
    """Returns the workload's report of its data, and its warnings. No model is made.

    wanted: samples to add, as `samples`.

    Rows that `train` would refuse are left out and counted: `refused by train` has each problem that it would report.
    Raises UserError if nothing is left to show.
    """
    from drivetrain.distributed.rng import seed_everything
    from drivetrain.training.workload_rules import check_workload
    from drivetrain.workloads.build import build_workload

    seed_everything(run.seed)
    try:
        workload = build_workload(run.workload.lenient(), run.seed)
    except UserError as error:
        return _of_failure(run, error), []
    report = dict(workload.data_report)
    refused = list(_refused_rows(run.workload, report))
    problems = [*run.workload.file_problems()] or [*_context_problems(run.workload)]
    refused += [f"{found.field}: {found.why}; {found.fix}" for found in problems]
    try:
        check_workload(run, workload)
    except UserError as error:
        refused += [f"{found.field}: {found.why}; {found.fix}" for found in error.problems]
    shown = {} if wanted is None else {SAMPLES: _samples(workload, wanted)}
    warnings = [each for each in workload.warnings if not _is_of_lost_rows(each)]
    return {**report, **shown, REFUSED: refused}, warnings


def _samples(workload: Workload, wanted: Wanted) -> list[dict[str, Any]]:
    """Returns samples as a person looks at them, each with its number from 0."""
    from drivetrain.data.streams.endless import draws

    part = workload.evaluation if wanted.of_evaluation else workload.train
    places = [] if part is None else draws(part, wanted.first + wanted.count)[wanted.first :]
    return [{"number": number, **workload.preview(part, number)} for number in places]


def show_verified(run: RunConfig, output: Console, as_json: bool) -> int:
    """Prints for each data file whether it is still as runs recorded it. Returns the exit code: 1 where one does not.

    Raises UserError for a workload that records no digests of its files.
    """
    from drivetrain.data.verification import verified

    if run.workload.digested is None:
        why = f"data of {run.workload.type} are read at each start"
        raise problem("--verify", why, "there is nothing to compare: leave it out")
    found = list(verified(run.workload))
    if as_json:
        output.print_json(dumps({"files": [asdict(each) for each in found]}))
    for each in () if as_json else found:
        output.print(f"{STATES[each.state]}: {escape(each.path)}", soft_wrap=True)
    return int(any(each.state == "changed" for each in found))


def _context_problems(workload: WorkloadBlock) -> Iterator[Problem]:
    """Yields lengths beyond a context that the model's config leaves to its kind's default, which no file states, and
    what keeps that config from being made."""
    from drivetrain.models.classifier_config import config_problems
    from drivetrain.models.language_options import context_length
    from drivetrain.models.model_folders import config_of

    model = workload.described_model
    if model is None or (model.path is not None and not Path(model.path).expanduser().is_dir()):
        return  # of a model on the hub no file is fetched for a look at the data
    if model.path is None:
        problems = config_problems(workload.auto_class, model.config or {}, "workload.model.config")
        if problems:
            yield from problems
            return
    config = config_of(model.path, model.config, "workload.model", model.trust_remote_code)
    yield from workload.context_problems(context_length(config))


def _is_of_lost_rows(warning: str) -> bool:
    """Returns whether a problem is about rows that were lost, which the report lists; `train` might refuse them."""
    from drivetrain.workloads.language_data import LEFT_OUT

    return LEFT_OUT in warning


def _of_failure(run: RunConfig, error: UserError) -> dict[str, Any]:
    """Returns what became of each row when no sample is left. Raises the error if the data are wrong in another way."""
    if run.workload.ACCOUNTS:
        from drivetrain.workloads.build import build_workload

        module, _, function = run.workload.ACCOUNTS.partition(":")
        report = getattr(import_module(module), function)(run.workload.lenient(), run.seed)
        if report is not None:
            return {**report, REFUSED: [f"{found.field}: {found.why}" for found in error.problems]}
        build_workload(run.workload.strict(), run.seed)  # raises, and names the rows
    raise error


def _refused_rows(workload: WorkloadBlock, report: Report) -> Iterator[str]:
    if workload.accepted_bad_rows is None:
        return
    yield from _bad_rows(report, workload.accepted_bad_rows)
    rows = sum(_looked_at(report, each) for each in report["sets"])
    long = sum(each["too long"] for each in report["sets"])
    if long and workload.refuses_long_samples:
        yield f"workload.data.too_long: {long:,} of {rows:,} rows are too long; give truncate or drop"


def _bad_rows(report: Report, given: BadRows) -> Iterator[str]:
    """Yields what `train` would report about unusable rows, and the setting that leaves them out."""
    counts = {each["name"]: (each["unusable rows"], _looked_at(report, each)) for each in report["sets"]}
    if given == "error":
        bad, rows = (sum(numbers) for numbers in zip(*counts.values(), strict=True))
        if bad:
            worst = max(counts.values(), key=lambda pair: pair[0] / max(1, pair[1]))
            yield f"workload.data.bad_rows: {bad:,} of {rows:,} rows cannot be used; {allowance(*worst)}"
        return
    most = most_dropped(given)
    for name, (bad, rows) in counts.items():
        if exceeds(bad, rows, most):
            why = f"{bad:,} of {rows:,} rows of {name} cannot be used, more than {100 * most:g} %"
            yield f"workload.data.bad_rows: {why}; {allowance(bad, rows)}"


def _looked_at(report: Report, dataset: Report) -> int:
    return min(dataset["rows"], report.get("looked at", dataset["rows"]))
