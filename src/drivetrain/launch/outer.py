"""Under torchrun or `accelerate launch` the ranks are there already: they are recognised and joined."""

from __future__ import annotations

import os
from dataclasses import dataclass

from drivetrain.config.engine import ENGINES, traits
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem

NAMED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class OuterLauncher:
    """This process as one of those that another launcher started."""

    rank: int
    world_size: int
    processes: int  # on this node

    @classmethod
    def here(cls) -> OuterLauncher | None:
        if any(name not in os.environ for name in NAMED):
            return None
        rank, world, _, processes = (int(os.environ[name]) for name in NAMED[:4])
        return cls(rank, world, processes)

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
