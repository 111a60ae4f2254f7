"""Config → workload and engine: what training, evaluation and prediction start from."""

from __future__ import annotations

import torch

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.engines import build_engine
from drivetrain.engines.base import Engine, EngineOptions, Part, untimed
from drivetrain.hardware import torch_device
from drivetrain.memory.allocator import keep_freed_blocks
from drivetrain.optim import optimizer_factory
from drivetrain.rng import seed_everything
from drivetrain.workload_rules import check_workload
from drivetrain.workloads.base import Workload
from drivetrain.workloads.build import build_workload


def assemble(run: RunConfig, machine: Machine, training: bool, part: Part = untimed) -> tuple[Workload, Engine]:
    """Data read and checked, model built and wrapped, optimizer made if training. UserError before any work starts.

    part: how the engine's parts of a step are timed.
    """
    if run.allocator == "keep" and machine.device == "cpu":
        keep_freed_blocks()
    torch.use_deterministic_algorithms(run.deterministic)
    build_optimizer = optimizer_factory(run.optimizer) if training else None
    seed_everything(run.seed)
    workload = build_workload(run.workload, run.seed)
    if training:
        check_workload(run, workload)
    options = EngineOptions(
        precision=run.precision_spec,
        scaler=run.scaler,
        machine=machine,
        device=torch_device(machine),
        max_grad_norm=run.loop.max_grad_norm,
        recompute=run.recompute and training,
        compile=run.compile,
        part=part,
    )
    engine = build_engine(run.engine.name, options)
    seed_everything(run.seed)  # the model's start does not depend on what reading the data drew
    engine.setup(workload, build_optimizer)
    return workload, engine
