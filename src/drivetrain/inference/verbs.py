"""Evaluates and predicts with a checkpoint of a run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.data.loader import MicroBatch, evaluation_batches
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.errors import problem
from drivetrain.generation.prompts import answers
from drivetrain.inference.weights import find_checkpoint, load_into
from drivetrain.numerics.torch_precision import arithmetic
from drivetrain.training.assemble import assemble
from drivetrain.training.run import evaluate as evaluate_workload
from drivetrain.workloads.base import Samples
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
    run: RunConfig, machine: Machine, checkpoint: str, data: str | None, texts: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yields one row a sample, in order: {"sample": name or number, ...the sample itself, ...what the workload
    predicts}, and its answer where the workload generates answers.

    data: a file or a folder; None: the evaluation data. texts: in place of them. On several ranks all must exhaust it;
    the first one yields the rows.
    """
    with arithmetic(run.precision_spec, machine):
        ranks = Communicator()
        workload, engine = assemble(run, machine, ranks, training=False)
        samples = workload.text_samples(texts) if texts else workload.prediction_samples(data)
        load_into(engine, find_checkpoint(run, workload, checkpoint))
        batches = evaluation_batches(
            samples, workload.collate, run.evaluation_batch, run.loader, engine.data_rank, engine.data_world
        )
        if isinstance(workload, Generates) and workload.answers_samples:
            rows = _answered(run, workload, engine, ranks, samples, batches)
        else:
            rows = engine.predict(batches)
        for number, (name, row) in enumerate(zip(samples.names if ranks.is_first else [], rows, strict=True)):
            yield {"sample": name, **workload.described(samples, number), **row}


def _answered(
    run: RunConfig,
    workload: Generates,
    engine: Engine,
    ranks: Communicator,
    samples: Samples,
    batches: Iterable[MicroBatch],
) -> Iterator[dict[str, Any]]:
    """Adds answers to rows with prompts, a batch of each rank at a time: as many prompts at once as samples. Samples
    without a prompt have the same columns."""
    without = dict.fromkeys(("prompt", "answer", "reference"))
    size, start = run.evaluation_batch, 0
    for batch in batches:
        predicted = list(engine.predict([batch]))
        stop = min(start + size * engine.data_world, len(samples))
        prompts = workload.prompts_for(samples, range(start, stop))
        numbers, found = list(prompts), dict[int, dict[str, Any]]()
        for first in range(0, len(numbers), size):
            part = {number: prompts[number] for number in numbers[first : first + size]}
            found |= answers(engine, workload, ranks, part)
        for number, row in enumerate(predicted, start):
            yield {**row, **found.get(number, without)}
        start = stop
