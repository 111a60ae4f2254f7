"""Under torchrun, `accelerate launch` or `deepspeed` the ranks exist already: recognises and joins them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from drivetrain.config.engines import ENGINES
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem

NAMED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ON_THIS_NODE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # torchrun's name, and the deepspeed launcher's


@dataclass(frozen=True)
class OuterLauncher:
    """This process as one of those that an external launcher started."""

    rank: int
    world_size: int
    processes: int  # on this node

    @classmethod
    def here(cls) -> OuterLauncher | None:
        own = next((name for name in ON_THIS_NODE if name in os.environ), None)
        if own is None or any(name not in os.environ for name in NAMED):
            return None
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ[own]))

    def machine(self, seen: Machine) -> Machine:
        """Returns this node. If a scheduler shows each process a GPU of its own (srun --gpus-per-task=1), there are as
        many as processes, though each sees one."""
        apart = seen.device == "cuda" and seen.device_count == 1
        return replace(seen, device_count=self.processes) if apart else seen

    def fitted(self, run: RunConfig) -> tuple[RunConfig, list[Problem]]:
        """Returns the run with the launcher's processes, and the settings that contradict them."""
        nodes = self.world_size // self.processes
        problems = []
        if not run.engine.traits.spreads and self.world_size > 1:
            spreading = " or ".join(name for name, traits in ENGINES.items() if traits.spreads)
            why = f"{run.engine.name} runs in one process, but the launcher started {self.world_size}"
            problems.append(Problem("engine", why, f"give engine={spreading}, or start one process"))
        elif run.processes not in (None, self.processes):
            why = f"{run.processes} were given, but the launcher started {self.processes} on this node"
            problems.append(Problem("processes", why, "leave it out under another launcher"))
        if run.micro_batch_size == "auto" and self.world_size > 1:
            why = "auto starts processes again and again, and these were started by another launcher"
            problems.append(Problem("micro_batch_size", why, "give a number"))
        return run.model_copy(update={"processes": self.processes, "nodes": nodes}), problems


def end_if_rank(code: int) -> None:
    """Ends this process at once if it is one of several ranks that another launcher started; otherwise returns.

    gloo's threads may still free tensors of the last collective. They need Python's lock for that, and a thread that
    asks an interpreter for it that is shutting down is ended in the middle of C++, which aborts the process (-6).
    """
    outer = OuterLauncher.here()
    if outer is not None and outer.world_size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def accelerate_problems(run: RunConfig) -> Iterator[Problem]:
    """Reports options of `accelerate launch` that would have no effect: it passes them to Accelerate, through the
    environment."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no" and not run.precision.startswith(precision):
        why = f"{run.precision} is the run's, but accelerate launch got --mixed_precision {precision}"
        yield Problem("precision", why, "leave the flag out: the run file sets the precision")
    for name in ("fsdp", "deepspeed"):
        if os.environ.get(f"ACCELERATE_USE_{name.upper()}") == "true" and run.engine.driving.name != name:
            why = f"{run.engine.label} is the run's, but accelerate launch got --use_{name}"
            yield Problem("engine", why, f"give engine={name}, or launch with --multi_gpu instead")
    # without --multi_gpu and the like one process is started, whatever --num_processes says
    alone = "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ and OuterLauncher.here() is None
    if alone and run.engine.traits.spreads and run.processes is None:
        why = "accelerate launch was told of several, and has started one"
        fix = "launch with --multi_gpu, which starts them on CPUs too, or give processes, which are started from here"
        yield Problem("processes", why, fix)
