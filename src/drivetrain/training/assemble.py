"""Builds workload and engine from a config: the start of training, evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from drivetrain.config.adapter import rate_factors
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.data.remote_sources import fetched
from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.rng import seed_everything, seed_rank
from drivetrain.engines import build_engine
from drivetrain.engines.base import Engine, EngineOptions, Part, untimed
from drivetrain.engines.replaced_layers import check_installed
from drivetrain.errors import UserError
from drivetrain.memory.allocator import keep_freed_blocks
from drivetrain.optim.optimizers import OptimizerFactory, optimizer_factory
from drivetrain.runtime.hardware import torch_device
from drivetrain.training.auto_settings import Compiling, compiling, keeps_freed_memory, settle_rows
from drivetrain.training.model_memory import counted, refuse_too_large
from drivetrain.training.precompute import precompute, precompute_beside
from drivetrain.training.workload_rules import check_workload, metric_direction_of_file
from drivetrain.workloads.base import Workload
from drivetrain.workloads.build import build_workload


def assemble(
    run: RunConfig, machine: Machine, ranks: Communicator, training: bool, part: Part = untimed
) -> tuple[Workload, Engine]:
    """Reads and checks the data, builds and wraps the model, makes the optimizer if training. Raises UserError before
    any work starts.

    part: how the engine's parts of a step are timed.
    """
    run = fetched(run)  # as a rule it is, by the process that starts the ranks
    # its problems come before reading data
    build_optimizer = optimizer_of(run) if training else None
    check_installed(run.precision_spec)
    count = counted(run)  # on every rank: what it imports is imported side by side
    ranks.on_first(
        lambda: refuse_too_large(run, machine, training, count)
    )  # the others wait, and have built nothing yet
    workload = read_workload(run, training)
    compiles = compiling(run, machine, workload, training)
    if training:
        settle_rows(run, machine, workload, compiles.what is not False)
    return workload, _engine(workload, run, machine, ranks, build_optimizer, part, compiles)


def read_workload(run: RunConfig, training: bool, change: Callable[[Workload], None] | None = None) -> Workload:
    """Reads and checks the data. Raises UserError with all their problems, and with what a training of this run cannot
    do with them.

    change: made to the workload before it is checked.
    """
    run = fetched(run)
    seed_everything(run.seed)
    try:
        workload = build_workload(run.workload, run.seed, run.adapter, run.quantised_base, run.quantisation_aware)
    except UserError as error:
        raise UserError([*error.problems, *(metric_direction_of_file(run) if training else ())]) from error
    if change is not None:
        change(workload)
    if training:
        check_workload(run, workload)
    return workload


def assemble_around(
    workload: Workload,
    run: RunConfig,
    machine: Machine,
    ranks: Communicator,
    training: bool = True,
    part: Part = untimed,
    traced: bool = False,
    stage_blocks: int | None = None,
) -> Engine:
    """Returns the engine of a training of this workload, or of its evaluation alone.

    traced: whether its tensors shall have shapes alone; it runs in a FakeTensorMode then. stage_blocks: how many blocks
    a traced pipeline stage keeps of its own; None: all.
    """
    check_workload(run, workload)
    build_optimizer = optimizer_of(run) if training else None
    compiles = Compiling(run.compile is True and not traced)
    return _engine(workload, run, machine, ranks, build_optimizer, part, compiles, traced, stage_blocks)


def optimizer_of(run: RunConfig) -> OptimizerFactory:
    """Returns what makes the run's optimizer. Raises UserError for one that cannot be imported, or lacks an option."""
    return optimizer_factory(run.optimizer, run.compile is True, rate_factors(run.adapter or ()))


def _engine(
    workload: Workload,
    run: RunConfig,
    machine: Machine,
    ranks: Communicator,
    build_optimizer: OptimizerFactory | None,
    part: Part,
    compiles: Compiling,
    traced: bool = False,
    stage_blocks: int | None = None,
) -> Engine:
    torch.use_deterministic_algorithms(run.deterministic)
    options = EngineOptions(
        precision=run.precision_spec,
        scaler=run.scaler,
        machine=machine,
        device=torch_device(machine),
        devices=run.data_parallel_size,
        max_grad_norm=run.loop.max_grad_norm,
        recompute=run.recompute if build_optimizer is not None else False,
        compile=compiles.what,
        part=part,
        offload_activations=run.offload_activations and build_optimizer is not None,
        traced=traced,
        stage_blocks=stage_blocks,
    )
    sizes = run.evaluation_batch, run.precision_spec.name, build_optimizer is not None

    def alone(other: Workload) -> Engine:
        plain = replace(options, recompute=False, compile=False, offload_activations=False)
        engine = build_engine(run.engine, plain, ranks)
        engine.setup(other, None)
        return engine

    if not traced:
        precompute_beside(workload, alone, ranks, *sizes)
    engine = build_engine(run.engine, options, ranks)
    seed_everything(run.seed)  # the model's start does not depend on what reading the data drew
    engine.setup(workload, build_optimizer)
    if machine.device == "cpu" and not traced and keeps_freed_memory(run, machine):
        keep_freed_blocks()  # not before: what loading frees is of other sizes than what training takes
    if not traced:
        precompute(workload, engine, ranks, *sizes)
    if engine.random_stream:
        seed_rank(run.seed, engine.random_stream)
    return engine
