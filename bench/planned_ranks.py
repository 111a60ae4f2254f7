"""One rank of bench/planned.py: takes real steps of one way to run a recipe.

    python bench/planned_ranks.py RANK WORLD STORE RECIPE JSON STEPS MODULES

JSON: a list of overrides. STEPS: the fewest that are timed. MODULES: a file with names of modules to import beforehand,
so that memory counts without them.
Prints a line of JSON on the first rank, the largest figures of the ranks; or on the rank that fails, why.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from planned_page import DISTURBED

from drivetrain.config import rules
from drivetrain.config.load import load
from drivetrain.config.run import RunConfig
from drivetrain.distributed.communicator import Communicator
from drivetrain.measure.memory import TensorPeak, peaks, reset_peaks
from drivetrain.measure.other_programs import busy_seconds, own_seconds
from drivetrain.memory.limit import limited
from drivetrain.memory.shortage import give_back
from drivetrain.numerics.torch_precision import arithmetic
from drivetrain.plan.trace_batches import fullest_window
from drivetrain.runtime.hardware import detect
from drivetrain.training.assemble import assemble_around, read_workload
from drivetrain.training.auto_settings import settle_rows

FIRST, FEWEST = 2, 3  # steps before those that are timed; how few are where they are long
LONG = 15.0  # seconds that the timed steps may take together, before they become fewer
SHORT, MOST = 1.0, 300  # seconds that they take at least, up to so many: the kernel counts other programs in 10 ms
TRIES = 4  # until no other program disturbs
CPU = torch.device("cpu")


def main() -> None:
    rank, world, store, recipe = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    ranks = Communicator()
    import_all(Path(sys.argv[7]).read_text().split())
    try:
        found: dict[str, Any] = measured(recipe, json.loads(sys.argv[5]), ranks, int(sys.argv[6]))
        found = fullest(ranks.all_gather(found))
    except Exception as error:  # of one rank, perhaps, which others wait for: they fail as soon as it has gone
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"[:300]}), flush=True)
        os._exit(1)
    if rank == 0:
        print(json.dumps(found), flush=True)
    os._exit(0)  # gloo's threads would wait


def import_all(names: list[str]) -> None:
    for name in names:
        with suppress(Exception):  # one that only another program can import
            import_module(name)


def measured(recipe: Path, overrides: list[str], ranks: Communicator, steps: int) -> dict[str, Any]:
    machine, run = detect(), read(recipe, overrides)
    workload = read_workload(run, training=True)
    settle_rows(run, machine, workload, compiles=False)
    give_back()
    before, mapped_before = resident_now(), mapped_now()
    with arithmetic(run.precision_spec, machine), limited(run.memory_limit_bytes, "cpu"):
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
        timed = number_of_steps(max(ranks.all_gather(last)), steps)
        for _ in range(TRIES if steps > 1 else 1):
            work = Work()
            seconds = [seconds_of(step) for _ in range(timed)]
            used = work.used()
            if foreign_cores(ranks.all_gather(used)) <= DISTURBED:
                break
        resident = peaks(CPU)["resident"] - before
        mapped = mapped_now() - mapped_before
        engine.close()
    return {
        "tensor": min(peak.phases[-2:]),  # the first step has no optimizer state yet
        "resident": resident,
        "mapped": mapped,
        "seconds": statistics.median(seconds),
        "steps": timed,
        "threads": torch.get_num_threads(),
        **used,
    }


def number_of_steps(seconds: float, fewest: int) -> int:
    """Returns how many steps of so many seconds are timed."""
    if fewest == 1:
        return 1
    return min(max(fewest, math.ceil(SHORT / seconds)), MOST, max(FEWEST, int(LONG / seconds)))


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
    largest = {
        name: max(each[name] for each in found)
        for name in ("tensor", "resident", "mapped", "seconds", "steps", "threads")
    }
    mine = max(each["own"] for each in found) / found[0]["steps"]
    return {**largest, "processor_seconds": mine, "foreign_cores": foreign_cores(found)}


def foreign_cores(found: list[dict[str, Any]]) -> float:
    foreign = found[0]["busy"] - sum(each["own"] for each in found)
    return round(max(0.0, float(foreign / found[0]["elapsed"])), 3)


def read(recipe: Path, overrides: list[str]) -> RunConfig:
    run, problems = load(recipe, overrides)
    assert run is not None, problems
    run, problems = rules.judged(run, problems, detect())
    assert not problems, problems
    return run


def mapped_now() -> int:
    """Returns the resident bytes of files: the code of libraries that was used so far."""
    [kilobytes] = re.findall(r"RssFile:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


def resident_now() -> int:
    reset_peaks(CPU)
    return peaks(CPU)["resident"]


if __name__ == "__main__":
    main()
