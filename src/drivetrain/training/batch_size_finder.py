"""Finds the size for `micro_batch_size: auto`: tries sizes on the longest samples, in processes that end afterwards and
train nothing.

A trial holds the same memory as a training: gradients (unless one micro-batch is the whole share), and the optimizer's
state, which the first step makes. So the training can begin with a size that passes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.data.loader import MicroBatch
from drivetrain.data.streams.endless import draws
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.memory.limit import limited, trial_limit
from drivetrain.memory.shortage import LESS, give_back, room_for
from drivetrain.numerics.torch_precision import arithmetic
from drivetrain.training.assemble import assemble
from drivetrain.training.batch_size_trials import Tried, sizes
from drivetrain.workloads.base import Workload

TOO_FEW = "Expected more than 1 value per channel"  # BatchNorm says so of one sample


def find(config: RunConfig, machine: Machine, folder: Path, quiet: bool) -> Tried:
    """Tries sizes until none is left; raises OutOfMemory at the first that does not fit. Called by every rank.

    The folder is this machine's, and keeps the results for the next processes.
    """
    ranks, replicas = Communicator(), config.devices // config.world_size
    tried, possible = Tried.read(folder), sizes(config)
    tried.fit, tried.fails = min(ranks.all_gather((tried.fit, tried.fails)), key=lambda each: max(each[0], default=0))
    most = trial_limit(config.memory_limit_bytes, machine.device, config.processes or 1)
    field = "micro_batch_size" if config.memory_limit is None else "memory_limit"
    with arithmetic(config.precision_spec, machine), limited(most, machine.device, field):
        with room_for("building the model"):
            workload, engine = assemble(_plain(config), machine, ranks, training=True)
            workload.rows = None  # whose length follows from what fits
        trial = _Trial(config, workload, engine, possible[-1])
        while (size := tried.next(possible)) is not None:
            tried.trying = size
            _keep(tried, folder)
            with room_for(f"micro-batches of {size} sample(s)", size, f"try {LESS}"):
                try:
                    trial(size, replicas)
                except ValueError as error:
                    if TOO_FEW not in str(error) or size == possible[-1]:
                        raise
                    tried.least = size + 1
                    continue
            ranks.all_gather(None)  # it fits when it fits on all
            tried.fit, tried.trying = [*tried.fit, size], None
            _keep(tried, folder)
            if ranks.is_first and not quiet:
                sys.stderr.write(f"micro_batch_size: {size} fits\n")
        engine.close()
    return tried


def _plain(config: RunConfig) -> RunConfig:
    """Returns the run uncompiled unless the run file asks for compiling: every size would be compiled, and code as
    written takes no less memory."""
    return config.model_copy(update={"compile": config.compile is True})


def longest(workload: Workload, count: int) -> list[Any]:
    """Returns so many of the training's samples, the longest first if lengths are known."""
    indices = np.array(draws(workload.train, count))
    if workload.lengths is not None:
        indices = np.argsort(-np.asarray(workload.lengths), kind="stable")[:count]
    return [workload.train.load(int(index), 0) for index in indices]


class _Trial:
    def __init__(self, config: RunConfig, workload: Workload, engine: Engine, largest: int) -> None:
        self._config, self._workload, self._engine, self._largest = config, workload, engine, largest
        self._samples: list[Any] = []
        self._has_state = False

    def __call__(self, size: int, replicas: int) -> None:
        """Runs a window of such micro-batches and its update; twice at first, with the optimizer's state from then
        on."""
        wanted = size * replicas
        if len(self._samples) < wanted:
            self._samples = longest(self._workload, wanted)
        for _ in range(1 if self._has_state else 2):
            self._engine.forward_backward([self._piece(wanted) for _ in range(self._count(size))])
            self._engine.optimizer_step(0.0)
        self._has_state = True
        give_back()

    def _piece(self, wanted: int) -> MicroBatch:
        samples = self._samples[:wanted]
        return MicroBatch(self._workload.collate(samples), positions=np.arange(len(samples)))

    def _count(self, size: int) -> int:
        return max(self._config.engine.stages, 1 if size == self._largest else 2)


def _keep(tried: Tried, folder: Path) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        tried.write(folder)
