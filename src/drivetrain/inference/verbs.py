"""Evaluates and predicts with a checkpoint of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.distributed.communicator import Communicator
from drivetrain.errors import problem
from drivetrain.inference.predicted_rows import PredictedRows, request_of
from drivetrain.inference.weights import find_checkpoint, load_into
from drivetrain.numerics.torch_precision import arithmetic
from drivetrain.training.assemble import assemble
from drivetrain.training.run import evaluate as evaluate_workload
from drivetrain.workloads.base import NamedSamples
from drivetrain.workloads.generating import Generates


def evaluate(run: RunConfig, machine: Machine, checkpoint: str) -> dict[str, Any]:
    """Returns a checkpoint's metrics over the evaluation data: {"checkpoint", "metrics", "samples", "seconds"}."""
    with arithmetic(run.precision_spec, machine):
        workload, engine = assemble(run, machine, Communicator(), training=False)
        if workload.evaluation is None:
            raise problem("workload", "there are no evaluation data", "give evaluation data in the run file")
        path = find_checkpoint(run, workload, checkpoint)
        load_into(engine, path)
        start = time.perf_counter()
        metrics = evaluate_workload(run, workload, engine)
        seconds = time.perf_counter() - start
        return {
            "checkpoint": str(path),
            "metrics": metrics,
            "samples": len(workload.evaluation),
            "seconds": seconds,
        }


def predict(
    run: RunConfig,
    machine: Machine,
    checkpoint: str,
    data: str | None,
    texts: Sequence[str] = (),
    begin: Callable[[dict[str, Any]], int] = lambda _: 0,
) -> Iterator[dict[str, Any]]:
    """Yields one row a sample, in order: {"sample": name or number, ...the sample itself, ...what the workload
    predicts}, and its answer where the workload generates answers.

    data: a file or a folder; None: the evaluation data. texts: in place of them; a language model answers them. begin:
    called on the first rank with all that decides the rows; returns the number of those that are there already, which
    are passed over. On several ranks all must exhaust the rows; the first one yields them.
    """
    with arithmetic(run.precision_spec, machine):
        ranks = Communicator()
        workload, engine = assemble(run, machine, ranks, training=False)
        prompts = workload.prompts_of(texts) if texts and isinstance(workload, Generates) else None
        samples: NamedSamples | None = None
        if prompts is None:
            samples = workload.text_samples(texts) if texts else workload.prediction_samples(data)
        path = find_checkpoint(run, workload, checkpoint)
        load_into(engine, path)
        start = ranks.on_first(lambda: begin(request_of(run, path, data, texts)))
        rows = PredictedRows(run, workload, engine, ranks)
        if samples is None:
            yield from rows.of_prompts(prompts or (), start)
        else:
            yield from rows.of_samples(samples, start)
