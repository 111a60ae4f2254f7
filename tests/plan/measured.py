"""Measures the tensor peak of real steps, as the meters of a run do, on each rank of a group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.config import rules
from drivetrain.config.load import load
from drivetrain.config.run import RunConfig
from drivetrain.distributed.communicator import Communicator
from drivetrain.measure.memory import TensorPeak
from drivetrain.numerics.torch_precision import arithmetic
from drivetrain.plan.trace_batches import fullest_step
from drivetrain.runtime.hardware import detect
from drivetrain.training.assemble import assemble
from drivetrain.training.auto_settings import order_of, total_steps_of
from drivetrain.training.batching import window_slice
from drivetrain.training.windows import windows_of

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
MEASURED = 4  # steps: gloo's thread may let go of a buffer after the rank went on, which only adds to a step's peak


def write_run(folder: Path, **data: Any) -> str:
    """Writes the run file of a tiny Llama that trains on these data; returns its path."""
    run = {
        "workload": {"type": "language_model", "model": {"config": LLAMA}, "data": data},
        "batch_size": 8,
        "loop": {"steps": 2},
        "schedule": {"name": "constant"},
        "output": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(json.dumps(run))
    return str(folder / "run.yaml")


def read_run(run_file: str, overrides: Sequence[str]) -> RunConfig:
    run, problems = load(Path(run_file), overrides)
    assert run is not None, problems
    run, problems = rules.judged(run, problems, detect())
    assert not problems, problems
    return run


def measured_peaks(run_file: str, cases: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """Returns for each list of overrides the bytes of a step's peak on this rank, once the optimizer has its state, and
    the number of flat buckets of gradients that the engine keeps."""
    return [measured_peak(read_run(run_file, overrides)) for overrides in cases]


def measured_peak(run: RunConfig) -> tuple[int, int]:
    machine = detect()
    with arithmetic(run.precision_spec, machine):
        workload, engine = assemble(run, machine, Communicator(), training=True)
        order, mine = order_of(run, workload), window_slice(run, machine, workload, engine)
        step = fullest_step(order, mine, total_steps_of(run, order))
        [window] = windows_of(run, workload, engine, order, range(step, step + 1), mine, workers=False)
        peaks = []
        for _ in range(1 + MEASURED):
            with TensorPeak() as peak:
                batches = [tensor for batch in window.micro_batches for tensor in batch.tensors.values()]
                peak.track([*engine.tensors(), *batches])
                engine.statistics.keep()
                engine.forward_backward(window.micro_batches)
                engine.optimizer_step(1.0)
            assert peak.failure is None
            peaks.append(peak.peak_bytes)
        buckets = len(engine.held_tensors().get("gradients", ()))
        engine.close()
    return min(peaks[1:]), buckets
