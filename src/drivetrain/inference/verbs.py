"""Evaluates and predicts with a checkpoint of a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.errors import problem
from drivetrain.generation.answering import sampler_beside
from drivetrain.generation.text_metrics import ScoredAnswers, TextMetrics
from drivetrain.inference.predicted_rows import PredictedRows
from drivetrain.inference.prediction_request import request_of
from drivetrain.inference.weights import find_checkpoint, load_into
from drivetrain.numerics.torch_precision import arithmetic
from drivetrain.runtime.progress_line import SAMPLES, ProgressLine
from drivetrain.training.assemble import assemble
from drivetrain.training.evaluation import evaluate as evaluate_workload
from drivetrain.training.evaluation import scores_of, unseen, write_gathered
from drivetrain.workloads.base import NamedSamples, Workload
from drivetrain.workloads.generating import Generates, Prompt
from drivetrain.workloads.sample_scores import scores_of_answers


def evaluate(run: RunConfig, machine: Machine, checkpoint: str, scores: Path | None = None) -> dict[str, Any]:
    """Returns a checkpoint's metrics over the evaluation data, and those of its answers to the run's prompts:
    {"checkpoint", "metrics", "samples", "seconds"}. scores: a file that takes what each sample added to them."""
    with arithmetic(run.precision_spec, machine):
        ranks = Communicator()
        workload, engine = assemble(run, machine, ranks, training=False)
        if workload.evaluation is None:
            raise problem("workload", "there are no evaluation data", "give evaluation data in the run file")
        path = find_checkpoint(run, workload, checkpoint)
        load_into(engine, path)
        start = time.perf_counter()
        kept = None if scores is None else scores_of(workload)
        line = ProgressLine("evaluating", len(workload.evaluation) if ranks.is_first else 0, unit=SAMPLES)
        shown = line.reach if ranks.is_first else unseen
        metrics = evaluate_workload(run, workload, engine, scores=kept, shown=shown)
        line.end()
        answers = _scored_answers(run, workload, engine, ranks)
        seconds = time.perf_counter() - start
        if kept is not None and scores is not None:
            of_answers = scores_of_answers(answers.each, answers.references)
            write_gathered(kept, engine.data_rank, ranks, scores, of_answers)
        return {
            "checkpoint": str(path),
            "metrics": {**metrics, **answers.values},
            "samples": len(workload.evaluation),
            "seconds": seconds,
        }


def _scored_answers(run: RunConfig, workload: Workload, engine: Engine, ranks: Communicator) -> ScoredAnswers:
    """Returns the scores of the answers to the run's prompts, the same on all ranks; none if none are asked for."""
    metrics, rows = TextMetrics(run.evaluation.generation), run.evaluation_batch
    answer = sampler_beside(engine, workload, ranks, rows) if run.evaluation.generation else None
    if answer is None:
        return metrics.scored([])
    answered = answer()
    return ranks.on_first(lambda: metrics.scored(answered))


def predict(
    run: RunConfig,
    machine: Machine,
    checkpoint: str,
    data: str | None,
    texts: Sequence[str] = (),
    begin: Callable[[dict[str, Any]], int] | None = None,
    shown: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yields one row a sample, in order: {"sample": name or number, ...the sample itself, ...what the workload
    predicts}, and its answer where the workload generates answers.

    data: a file or a folder; None: the evaluation data. texts: in place of them. A language model answers texts, and
    all rows of data of which some have no reply; these have no loss. begin: called on the first rank with all that
    decides the rows; returns the number of those that are there already, which are passed over and reported on
    stderr. shown: whether a line on stderr says how far it is. On several ranks all must exhaust the rows; the first
    one yields them.
    """
    with arithmetic(run.precision_spec, machine):
        yield from rows_in_arithmetic(run, machine, checkpoint, data, texts, begin, shown)


def rows_in_arithmetic(
    run: RunConfig,
    machine: Machine,
    checkpoint: str,
    data: str | None,
    texts: Sequence[str] = (),
    begin: Callable[[dict[str, Any]], int] | None = None,
    shown: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yields the rows of `predict` for a caller that enters `arithmetic` itself, around each next row or all of
    them."""
    ranks = Communicator()
    workload, engine = assemble(run, machine, ranks, training=False)
    prompts: Sequence[Prompt] | None = None
    if isinstance(workload, Generates):
        prompts = workload.prompts_of(texts) if texts else None if data is None else workload.prompts_in(data)
    samples: NamedSamples | None = None
    if prompts is None:
        samples = workload.text_samples(texts) if texts else workload.prediction_samples(data)
    path = find_checkpoint(run, workload, checkpoint)
    start = 0 if begin is None else ranks.on_first(lambda: begin(request_of(run, path, data, texts)))
    if start and ranks.is_first:
        _tell_start(start, len(prompts or () if samples is None else samples))
    load_into(engine, path)
    predicted = PredictedRows(run, workload, engine, ranks)
    rows = predicted.of_prompts(prompts or (), start) if samples is None else predicted.of_samples(samples, start)
    if not (shown and ranks.is_first):
        yield from rows
        return
    line = ProgressLine("predicting", len(prompts or () if samples is None else samples), start, SAMPLES)
    yield from in_bursts(rows, predicted.at_once, lambda number: line.reach(start + number))
    line.end()


def _tell_start(start: int, rows: int) -> None:
    line = f"going on at row {start + 1:,} of {rows:,}" if start < rows else f"all {rows:,} rows are there already"
    print(f"{line}: an earlier prediction was interrupted", file=sys.stderr, flush=True)


def in_bursts(rows: Iterable[dict[str, Any]], at_once: int, reached: Callable[[int], None]) -> Iterator[dict[str, Any]]:
    """Yields rows of which `at_once` come together, and reports their number after each such burst: the first row of
    one would seem to have taken the time of all."""
    for number, row in enumerate(rows, 1):
        yield row
        if number % at_once == 0:
            reached(number)
