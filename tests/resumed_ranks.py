"""A rank's part of a resume through a run's own checkpoints, where each rank draws dropout masks of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.config.load import validate
from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.rng import seed_rank
from drivetrain.engines.base import Engine
from drivetrain.training.progress import Progress
from drivetrain.training.run_checkpoints import RunCheckpoints
from drivetrain.workloads.base import BestMetric
from tests.parity.cases import SAMPLES, Case, engine_of, workload
from tests.parity.promises import steps


def masks_after_a_resume(case: Case, root: Path) -> tuple[list[bool], list[list[float]]]:
    """Two steps, a save, two more; then the two more again in a new engine that restored the checkpoint.

    Returns, for this rank, whether each parameter ends with the same bits, and what its generator gives afterwards:
    without a break and resumed.
    """
    through = engine_of(case, workload(case.model))
    seed_rank(0, through.random_stream)
    steps(through, workload(case.model), range(2))
    _checkpoints(root, through).save(Progress(step=2))
    drawn = [_gone_on(case, through)]
    resumed = engine_of(case, workload(case.model))
    torch.manual_seed(5)  # a new process stands elsewhere
    _checkpoints(root, resumed).restore()
    drawn.append(_gone_on(case, resumed))
    whole, other = through.weights(), resumed.weights()
    return [torch.equal(weight, other[name]) for name, weight in whole.items()], drawn


def _gone_on(case: Case, engine: Engine) -> list[float]:
    steps(engine, workload(case.model), range(2, 4))
    found: list[float] = torch.rand(3).tolist()
    return found


def _checkpoints(root: Path, engine: Engine) -> RunCheckpoints:
    raw: dict[str, Any] = {"workload": {"type": "module", "path": "x.py"}, "batch_size": 8, "loop": {"steps": 9}}
    run, problems = validate({**raw, "engine": "ddp", "processes": dist.get_world_size()}, [])
    assert run is not None, problems
    metric = BestMetric("loss", higher_is_better=False)
    return RunCheckpoints(root, run, engine, Communicator(), metric, range(SAMPLES), lambda _: None)
