"""Under torchrun, `accelerate launch` or `deepspeed` the ranks are there already: they are recognised and joined."""

from __future__ import annotations

import os
from dataclasses import dataclass

from drivetrain.config.engine import ENGINES, traits
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem

NAMED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ON_THIS_NODE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # torchrun's name, and the deepspeed launcher's


@dataclass(frozen=True)
class OuterLauncher:
    """This process as one of those that another launcher started."""

    rank: int
    world_size: int
    processes: int  # on this node

    @classmethod
    def here(cls) -> OuterLauncher | None:
        own = next((name for name in ON_THIS_NODE if name in os.environ), None)
        if own is None or any(name not in os.environ for name in NAMED):
            return None
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ[own]))

    def fitted(self, run: RunConfig) -> tuple[RunConfig, list[Problem]]:
        """The run with the launcher's processes, and what contradicts them."""
        nodes = self.world_size // self.processes
        problems = []
        if not traits(run.engine).spreads and self.world_size > 1:
            spreading = " or ".join(name for name, traits in ENGINES.items() if traits.spreads)
            why = f"{run.engine.name} runs in one process, but the launcher started {self.world_size}"
            problems.append(Problem("engine", why, f"give engine={spreading}, or start one process"))
        elif run.processes not in (None, self.processes):
            why = f"{run.processes} were given, but the launcher started {self.processes} on this node"
            problems.append(Problem("processes", why, "leave it out under another launcher"))
        return run.model_copy(update={"processes": self.processes, "nodes": nodes}), problems
