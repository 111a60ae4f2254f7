"""Decides the settings that a run file leaves to the device and the data: whether blocks are compiled, and one length
for packed rows.

They are decided once the data are read and before the model is built. `auto` never changes the result of a step, except
by the rounding of compiled kernels; on a CPU it changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from drivetrain.config import rules
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.data.fixed_rows import MULTIPLE, cheapest_rows
from drivetrain.data.loading_time import workers_for
from drivetrain.data.micro_batches import rank_share
from drivetrain.data.order import Order, RepeatedOrder
from drivetrain.data.row_shape import Rows
from drivetrain.memory.garbage import EVERY
from drivetrain.workloads.base import Workload
from drivetrain.workloads.generating import MakesSamples

# What a micro-batch costs beside its tokens, in tokens. On a CPU measured: a 4 x 256 BERT takes 20 ms for one of 8
# tokens and 0.24 ms for each further one; 40 to 320 differ little. A GPU takes as long for a few thousand as for none,
# and one with fast products of 16 bits for more: on an H200 BERT-base takes 60 ms to start a pass, in which it computes
# some 30,000 tokens. There batches of 128 texts in two micro-batches, each with lengths of its own for which kernels
# are looked up anew, trained at a quarter of the speed of whole ones (bench/results/gpu-nvidia-h200.md).
MICRO_BATCH_TOKENS = {"cpu": 120, "cuda": 4096}
FAST_HALVES = 16_384  # from compute capability 8.0 on
# The most tokens of packed rows that run at once where the run file bounds nothing. On a CPU measured: a Llama of 8
# blocks 256 wide on pairs of 10,000 tokens a step is as quick with 2,048 at once, in a third of the memory.
PACKED_AT_ONCE = {"cpu": 2048}
# Forward passes from which compiling is taken to pay: it takes about a minute, and saves a pass some hundredths of a
# second at least
LEAST_PASSES = 1000


def micro_batch_tokens(run: RunConfig, machine: Machine) -> int:
    """Returns what a micro-batch costs beside its tokens, in tokens."""
    fast = run.precision_spec.compute != "float32" and (machine.compute_capability or (0, 0)) >= (8, 0)
    return FAST_HALVES if machine.device == "cuda" and fast else MICRO_BATCH_TOKENS[machine.device]


def packed_tokens(config: RunConfig, machine: Machine, packs: bool) -> int | None:
    """Returns how many tokens of packed rows run at once at most; None: as many as the samples have."""
    bounded = config.micro_batch_size is not None or config.micro_batch_tokens is not None
    return config.micro_batch_tokens if bounded or not packs else PACKED_AT_ONCE.get(machine.device)


def order_of(config: RunConfig, workload: Workload) -> Order:
    order = workload.order(config.global_batch, config.seed, by_epochs=config.loop.steps is None)
    return RepeatedOrder(order, workload.steps_per_batch) if isinstance(workload, MakesSamples) else order


def total_steps_of(config: RunConfig, order: Order) -> int:
    if config.loop.steps is not None:
        return config.loop.steps
    assert config.loop.epochs is not None, "rules.check lets no run without a length pass"
    return int(order.steps_per_epoch) * config.loop.epochs


@dataclass(frozen=True)
class Compiling:
    """The decision. what: False, True (the whole model if no blocks repeat), or "blocks" (those alone). why_not: the
    reason of auto."""

    what: bool | Literal["blocks"]
    why_not: str | None = None


def compiling(
    run: RunConfig, machine: Machine, workload: Workload, training: bool, elsewhere: bool = False
) -> Compiling:
    """Returns the run file's choice; auto compiles repeated blocks for a training on a GPU, unless something speaks
    against it. elsewhere: the machine is another one, whose Triton is not looked for."""
    if run.compile != "auto":
        return Compiling(run.compile)
    if machine.device == "cpu" or not training:
        return Compiling(False)
    why = next(_against(run, machine, workload, elsewhere), None)
    return Compiling("blocks") if why is None else Compiling(False, why)


def _against(run: RunConfig, machine: Machine, workload: Workload, elsewhere: bool) -> Iterator[str]:
    known = rules.check_anywhere(run)
    compiled = run.model_copy(update={"compile": True})
    yield from (problem.why for problem in rules.check_anywhere(compiled) if problem not in known)
    if not run.engine.traits.gains_by_compiling:
        yield f"engine={run.engine.label} is not known to gain by it"
    if run.quantised_base is not None or run.quantisation_aware is not None:
        yield "layers with codes for weights are not known to gain by it"
    others = {adapter.method for adapter in run.adapter or ()} - {"lora"}
    if others:
        yield f"adapters of kind {', '.join(sorted(others))} are not known to gain by it"
    if run.deterministic:
        yield "deterministic: true, and kernels are chosen anew at each start"
    yield from run.workload.compile_doubts(run, machine, workload.packs)
    passes = _passes(run, workload)
    if passes < LEAST_PASSES:
        yield f"{passes} forward passes are too few to win what it takes"
    if not elsewhere and find_spec("triton") is None:
        yield "Triton is not installed"


def _passes(run: RunConfig, workload: Workload) -> int:
    """Returns a lower bound of the forward passes of one device."""
    share = math.ceil(run.step_samples / run.data_parallel_size)
    return total_steps_of(run, order_of(run, workload)) * math.ceil(share / run.micro_batch)


def chosen(run: RunConfig, machine: Machine, workload: Workload, compiled: str | bool) -> dict[str, Any]:
    """Returns for the report the settings that were decided and that differ from the run file or from a CPU's.

    compiled: what the engine has compiled.
    """
    rows, wanted = workload.rows, compiling(run, machine, workload, training=True)
    why = wanted.why_not if compiled or not wanted.what else "the model has no blocks that repeat"
    workers = workers_for(workload.train) if run.loader.workers == "auto" else 0
    given_back = run.allocator == "auto" and not keeps_freed_memory(run, machine)
    settings = {
        "row_tokens": rows and rows.tokens,
        "not_compiled": why,
        "loader_workers": workers,
        "allocator": "system" if given_back else None,
    }
    return {name: value for name, value in settings.items() if value}


def keeps_freed_memory(run: RunConfig, machine: Machine) -> bool:
    """Returns whether freed memory is kept for reuse.

    Not with engines that shard on a CPU: the parameters that they gather and free, block by block, would leave gaps of
    other sizes than the next ones need. A rank of FSDP then holds more than one process does without it
    (docs/background/speed.md).
    """
    if run.allocator == "auto":
        return machine.device != "cpu" or not run.engine.gives_pieces
    return run.allocator == "keep"


def collect_every(run: RunConfig) -> int:
    """Returns the steps between full collections of garbage, on all ranks at once; 0: whenever Python starts one."""
    every = run.loop.collect_every
    return (EVERY if run.world_size > 1 else 0) if every == "auto" else every


def settle_rows(run: RunConfig, machine: Machine, workload: Workload, compiles: bool) -> None:
    """Decides how a training lays samples into packed rows: whether answers share their prompt, and which length rows
    are filled up to."""
    workload.shares_prompts = workload.packs and workload.why_not_shared(run, machine) is None
    workload.rows = rows_of(run, machine, workload, compiles)


def rows_of(run: RunConfig, machine: Machine, workload: Workload, compiles: bool) -> Rows | None:
    """Returns the length that packed rows are filled up to, or None: by default on a GPU and wherever blocks are
    compiled. A bound in tokens is the length, as far as a micro-batch's samples can fill it."""
    wanted = run.workload.fixed_rows
    if not workload.packs or workload.lengths is None:
        return None
    if not (machine.device == "cuda" or compiles if wanted == "auto" else wanted):
        return None
    lengths = np.asarray(workload.lengths)
    longest = max(int(lengths.max()), max(workload.evaluation_lengths or [0]))
    overhead = micro_batch_tokens(run, machine)
    most = run.micro_batch_tokens
    if most is not None:  # beyond what the longest samples together have, each row would be padding
        filled = max(longest, int(np.sort(lengths)[-run.micro_batch :].sum()))
        most = min(most, math.ceil(filled / MULTIPLE) * MULTIPLE)
    return cheapest_rows(_shares(run, workload, lengths), longest, run.micro_batch, overhead, most)


def _shares(run: RunConfig, workload: Workload, lengths: np.ndarray) -> Iterator[list[np.ndarray]]:
    """Yields for each step the lengths of each device's samples."""
    order, world = order_of(run, workload), run.data_parallel_size
    for step in range(total_steps_of(run, order)):
        ordered = np.sort(lengths[order.batch(step)[1]])
        yield [rank_share(ordered, rank, world) for rank in range(world)]
