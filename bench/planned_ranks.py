"""One rank of bench/planned.py: takes real steps of some ways to run a recipe, one way after the other.

    python bench/planned_ranks.py RANK WORLD STORE RECIPE JSON STEPS

JSON: a list of lists of overrides. STEPS: the most that are timed.
Prints a line of JSON for each on the first rank: the largest figures of the ranks.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.compare.busy import busy_seconds, own_seconds
from drivetrain.config import rules
from drivetrain.config.load import load
from drivetrain.config.run import RunConfig
from drivetrain.distributed.communicator import Communicator
from drivetrain.measure.memory import TensorPeak, peaks, reset_peaks
from drivetrain.numerics.torch_precision import arithmetic
from drivetrain.plan.trace_batches import fullest_window
from drivetrain.runtime.hardware import detect
from drivetrain.training.assemble import assemble_around, read_workload
from drivetrain.training.auto_settings import rows_of

FIRST, FEWEST = 2, 3  # steps before those that are timed; how few are where they are long
LONG = 15.0  # seconds that the timed steps may take together, before they become fewer
CPU = torch.device("cpu")


def main() -> None:
    rank, world, store, recipe = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    ranks = Communicator()
    for overrides in json.loads(sys.argv[5]):
        try:
            found: dict[str, Any] = measured(recipe, overrides, ranks, int(sys.argv[6]))
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}"[:300]}
        found = fullest(ranks.all_gather(found))
        if rank == 0:
            print(json.dumps(found), flush=True)
    os._exit(0)  # gloo's threads would wait


def measured(recipe: Path, overrides: list[str], ranks: Communicator, steps: int) -> dict[str, Any]:
    machine, run = detect(), read(recipe, overrides)
    import_module(f"drivetrain.engines.{run.engine.traits.implementation.partition(':')[0]}")
    workload = read_workload(run, training=True)
    workload.rows = rows_of(run, machine, workload, compiles=False)
    emptied()
    before = resident_now()
    with arithmetic(run.precision_spec, machine):
        engine = assemble_around(workload, run, machine, ranks)
        window = fullest_window(run, machine, workload, engine)

        def step() -> None:
            engine.statistics.keep()
            engine.forward_backward(window.micro_batches)
            engine.optimizer_step(1.0)

        with TensorPeak() as peak:  # from the first step on: engines keep buffers that they make in it
            given = [tensor for batch in window.micro_batches for tensor in batch.tensors.values()]
            peak.track([*engine.tensors(), *given])
            for _ in range(3):
                peak.begin_phase()
                step()
        for _ in range(FIRST):
            last = seconds_of(step)
        timed = min(steps, max(FEWEST, int(LONG / max(ranks.all_gather(last)))))
        work = Work()
        seconds = [seconds_of(step) for _ in range(timed)]
        used = work.used()
        resident = peaks(CPU)["resident"] - before
        engine.close()
    return {
        "tensor": min(peak.phases[-2:]),  # the first step has no optimizer state yet
        "resident": resident,
        "seconds": statistics.median(seconds),
        "steps": timed,
        "threads": torch.get_num_threads(),
        **used,
    }


def seconds_of(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


class Work:
    """Processor time since the start: of all programs, and of this process."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.perf_counter(), busy_seconds(), own_seconds()

    def used(self) -> dict[str, float]:
        busy, own = busy_seconds() - self._busy, own_seconds() - self._own
        return {"elapsed": time.perf_counter() - self._start, "busy": busy, "own": own}


def fullest(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one row of all ranks': their largest figures, and the cores that no rank used."""
    for each in found:
        if "failed" in each:
            return each
    foreign = found[0]["busy"] - sum(each["own"] for each in found)
    largest = {
        name: max(each[name] for each in found) for name in ("tensor", "resident", "seconds", "steps", "threads")
    }
    mine = max(each["own"] for each in found) / found[0]["steps"]
    return {**largest, "processor_seconds": mine, "foreign_cores": round(max(0.0, foreign / found[0]["elapsed"]), 3)}


def read(recipe: Path, overrides: list[str]) -> RunConfig:
    run, problems = load(recipe, overrides)
    assert run is not None, problems
    run, problems = rules.judged(run, problems, detect())
    assert not problems, problems
    return run


def emptied() -> None:
    """Gives back to the kernel what an earlier way has left in the heap."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def resident_now() -> int:
    reset_peaks(CPU)
    return peaks(CPU)["resident"]


if __name__ == "__main__":
    main()
