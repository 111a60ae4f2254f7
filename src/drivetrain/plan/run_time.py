"""The time of a run's step on a machine, and the disk that its checkpoints take."""

from __future__ import annotations

from drivetrain.config.run import RunConfig
from drivetrain.plan.machines import Cluster
from drivetrain.plan.speeds import FUSED, speeds_of
from drivetrain.plan.step_costs import StepCosts
from drivetrain.plan.step_time import Circumstances, StepTime, step_time

# starts of an operation's worth of time that the program takes for a message between CPUs, where each block's own are
# asked for by Python around it (shards that are gathered, layers that are split), and else; fitted to
# bench/results/planned.md
PROGRAM_OF_BLOCKS, PROGRAM = 60.0, 20.0
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def time_of(
    run: RunConfig, costs: StepCosts, cluster: Cluster, compiles: bool = False, data_seconds: float = 0.0
) -> StepTime:
    """Returns the time of one step: that of the slowest rank, for which the others wait. compiles: whether the run's
    blocks are compiled. data_seconds: loading one step's samples, which goes on beside computing.

    Raises UserError for a machine whose speed is not known.
    """
    speeds, given = speeds_of(cluster, run.world_size), circumstances(run, cluster, compiles, data_seconds)
    return max((step_time(each, speeds, given) for each in costs.ranks), key=lambda found: found.seconds)


def circumstances(run: RunConfig, cluster: Cluster, compiles: bool = False, data_seconds: float = 0.0) -> Circumstances:
    on_gpu = cluster.host.device == "cuda"
    precision = run.precision_spec
    return Circumstances(
        stages=run.engine.stages,
        micro_batches=micro_batches(run),
        causal=run.workload.is_causal and on_gpu,  # on a processor, masked pairs are computed too
        recomputes=run.recompute is True,
        fused=FUSED if compiles and on_gpu else 1.0,
        program=0.0 if on_gpu else PROGRAM_OF_BLOCKS if run.engine.shares(run.devices).parameters < 1 else PROGRAM,
        data_seconds=data_seconds,
        products=_products(precision.tf32, precision.layers is not None),
        dtype="tfloat32" if precision.tf32 else precision.compute,
    )


def micro_batches(run: RunConfig) -> int:
    """Returns the micro-batches of a rank in a step."""
    share = -(-run.step_samples // run.data_parallel_size)
    return max(1, -(-share // (run.micro_batch_limit or -(-run.micro_batch // (run.devices // run.world_size)))))


def checkpoint_bytes(run: RunConfig, costs: StepCosts) -> int:
    """Returns the bytes of one checkpoint: the trained weights in the type that they are kept in, and the optimizer's
    tensors of their size. Frozen weights are not saved."""
    own, states = BYTES[run.precision_spec.parameters], run.optimizer.kind.states or int(run.optimizer.momentum > 0)
    return costs.trained_parameters * own * (1 + states)


def disk_bytes(run: RunConfig, costs: StepCosts) -> int:
    """Returns the bytes of all checkpoints that a run keeps, and of the one that is written before another is
    deleted."""
    return checkpoint_bytes(run, costs) * (run.checkpoints.keep_last + run.checkpoints.keep_best + 1)


def _products(tf32: bool, in_eight_bits: bool) -> dict[str, str]:
    """Returns the type that stands for another in matrix products, though tensors are not of it."""
    return {"float32": "tfloat32"} if tf32 else {"bfloat16": "float8"} if in_eight_bits else {}
