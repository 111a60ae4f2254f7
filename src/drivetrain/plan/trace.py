"""Traces two steps of a run without its numbers, and with that without its memory, devices and ranks.

The engine sets itself up and trains as it always does, with tensors that have shapes alone (FakeTensorMode) and among
ranks that are not there (the `fake` process group). So what is recorded is what the engine does: nothing here knows how
one shards, gathers or recomputes. The second step counts: optimizers have made their state by then.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.data.loader import MicroBatch
from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.real_numbers import real_numbers
from drivetrain.engines.base import Engine
from drivetrain.errors import RunError, UserError
from drivetrain.measure import flops, observer
from drivetrain.measure.memory import TensorPeak
from drivetrain.memory.garbage import set_imports_apart
from drivetrain.models.planned_device import planned_for
from drivetrain.numerics.torch_precision import arithmetic
from drivetrain.plan import cuda_functions, fake_mode, grouped_products, trace_answers, trace_model
from drivetrain.plan.fake_mode import QuickFakeMode
from drivetrain.plan.host_functions import on_host
from drivetrain.plan.lines import on_line
from drivetrain.plan.memory import MemoryRecord
from drivetrain.plan.step_costs import StepCosts
from drivetrain.plan.timeline import Timeline
from drivetrain.plan.trace_batches import fullest_window, without_numbers
from drivetrain.plan.trace_model import built_fake
from drivetrain.plan.trace_operations import OperationRecord
from drivetrain.plan.trace_ranks import fake_ranks
from drivetrain.training.assemble import assemble_around
from drivetrain.training.auto_settings import settle_rows
from drivetrain.workloads.base import Workload

DECIDES = (DataDependentOutputException, DynamicOutputShapeException)  # a number of a tensor decides what comes next
# files that stand between a model and torch while it is traced
OURS = (
    *(__file__, observer.__file__, flops.__file__, trace_answers.__file__, trace_model.__file__),
    *(cuda_functions.__file__, fake_mode.__file__, grouped_products.__file__),
)
FEW, STAND_INS = 5, 3  # micro-batches of a step that are all traced; those that stand for more
CUDA_GRANULARITY = 512  # bytes; c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize


class Untraceable(RunError):
    """The model asks for numbers while it computes, so that it cannot be traced without them."""


@dataclass(frozen=True)
class StepTrace:
    """The trace of one step on one rank. timeline: a moment for each change of memory."""

    costs: StepCosts
    timeline: Timeline


def step_costs(run: RunConfig, machine: Machine, workload: Workload, rank: int = 0) -> StepCosts:
    """Returns the costs of one step on one rank. Raises as `step_trace` does, which has the arguments."""
    return step_trace(run, machine, workload, rank).costs


def step_trace(
    run: RunConfig, machine: Machine, workload: Workload, rank: int = 0, blocks: int | None = None
) -> StepTrace:
    """Traces one step on one rank. Raises Untraceable, and what the engine raises at set-up.

    run: of one engine, as `rules.judged` returns it. machine: the one that the run is planned for, which need not be
    here. workload: built from the run's block; its data are read, its model is not built. blocks: of those that repeat,
    how many the traced model has, or the rank's stage of a pipeline; None: all.
    """
    try:
        return _traced(run, machine, workload, rank, blocks)
    except (UserError, RunError):
        raise
    except Exception as error:  # whatever a model or a library does that cannot be done without numbers
        raise Untraceable(f"it cannot be traced: {_why(error)}; measure it with train or compare") from error


def _why(error: BaseException) -> str:
    """Returns what failed, and the line of code outside of torch that asked for it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame.filename and frame.filename not in OURS]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    if isinstance(error, DECIDES):
        return f"{getattr(error, 'func', error)} needs the numbers of a tensor{place}"
    first = next(iter(str(error).strip().splitlines()), "")[:200]
    return f"{type(error).__name__}: {first}{place}"


def _traced(run: RunConfig, machine: Machine, workload: Workload, rank: int, blocks: int | None) -> StepTrace:
    set_imports_apart()
    of_model, of_stage = (blocks, None) if run.engine.stages == 1 else (None, blocks)
    # Accelerate wraps a model as its driver's own engine does, but asks for numbers and a network meanwhile (its FSDP
    # frees what lies outside of the blocks after forward, which is more). No disk takes what has no numbers
    run = run.model_copy(update={"engine": run.engine.driving.without_disk()})
    on_cpu = replace(machine, device="cpu")  # fake tensors of a device that torch was not built for end the process
    mode = QuickFakeMode(like_cpu=machine.device == "cpu", allow_non_fake_inputs=True)
    record = Record(machine, _axis_of_all(run), run.engine.keeps_elsewhere or run.offload_activations)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(_without_tracebacks())
        # DeepSpeed checks how its flat tensors are aligned
        warnings.filterwarnings("ignore", "(?s)Accessing the data pointer of FakeTensor")
        # FSDP around tensor parallel: the loss is a view of a distributed tensor, which nothing writes to
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        ranks = stack.enter_context(fake_ranks(rank, run.world_size))
        stack.enter_context(arithmetic(run.precision_spec, on_cpu))
        stack.enter_context(planned_for(machine))
        stack.enter_context(built_fake(workload, mode, of_model))
        stack.enter_context(mode)
        if machine.device == "cuda":
            stack.enter_context(cuda_functions.on_cuda())
        if machine.device == "cuda" and run.engine.keeps_elsewhere:
            stack.enter_context(on_host())
        part = record.memory.part
        engine = assemble_around(workload, run, on_cpu, ranks, part=part, traced=True, stage_blocks=of_stage)
        stack.callback(engine.close)
        with real_numbers():
            settle_rows(run, machine, workload, compiles=False)
            window = fullest_window(run, machine, workload, engine)
        batches = without_numbers(window.micro_batches, mode)
        costs = record.of_two_steps(engine, batches, "traced", in_flight=run.engine.stages > 1)
        return StepTrace(replace(costs, stage_depths=engine.stage_depths), record.memory.timeline())


def measured_step_costs(run: RunConfig, machine: Machine, workload: Workload) -> StepCosts:
    """Returns the costs of one step of one process, of which two are taken with numbers, on this machine."""
    record = Record(machine)
    with arithmetic(run.precision_spec, machine):
        engine = assemble_around(workload, run, machine, Communicator(), part=record.memory.part)
        settle_rows(run, machine, workload, compiles=False)
        window = fullest_window(run, machine, workload, engine)
        try:
            return record.of_two_steps(engine, window.micro_batches, "measured")
        finally:
            engine.close()


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """While the block runs, PyTorch does not log an operator that fails without numbers: Untraceable has the reason."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _axis_of_all(run: RunConfig) -> str:
    """Returns the axis that all ranks lie along, where there is one alone; else the data's. Attention over context
    ranks has a group of its own, beside which the group of all is the one that sums gradients."""
    axes = ((axis, ranks) for axis, ranks in run.engine.axes.items() if axis != "cp")
    return next((axis for axis, ranks in axes if ranks == run.world_size), "dp")


class Record:
    """The records of one engine's steps."""

    def __init__(self, machine: Machine, whole: str = "dp", offloads: bool = False) -> None:
        """whole: the axis that the group of all ranks is. offloads: whether the host of a GPU keeps some of its
        tensors; other ones on its device are stand-ins, such as a pipeline has for what other stages hold."""
        on_cpu = machine.device == "cpu"
        self.memory = MemoryRecord(1 if on_cpu else CUDA_GRANULARITY, gloo=on_cpu)
        self._host = TensorPeak("meta")  # where a planned GPU's host keeps what it holds (host_functions.py)
        self._offloads = offloads and not on_cpu
        records = (OperationRecord(whole, self.memory.updates, self._offloads) for _ in range(2))
        self._operations, self._fewer = records
        self._start = time.perf_counter()

    def of_two_steps(
        self,
        engine: Engine,
        batches: list[MicroBatch],
        origin: Literal["traced", "measured"],
        in_flight: bool = False,
    ) -> StepCosts:
        """Takes two steps, and returns the costs of the second one.

        in_flight: whether several micro-batches are under way at once. Where they are not, and there are many, three
        of the largest stand for all: from the second on each holds the same, and what one more costs shows beside two;
        and the first step, after which the optimizer has its state and gradients were added up once, has two.
        """
        stand_ins = [max(batches, key=_size)] * STAND_INS if len(batches) > FEW and not in_flight else batches
        share = 1.0
        with self._host if self._offloads else nullcontext(), self.memory:
            if self._offloads:
                self._host.track(engine.tensors())
            _note_held(self.memory, engine, batches)
            _step(engine, stand_ins[:2], self.memory)
            if stand_ins is not batches:
                share = sum(map(_size, batches)) / _size(stand_ins[0]) - (STAND_INS - 1)
                with self._fewer:
                    _step(engine, stand_ins[1:], self.memory)
            with self._operations:
                _step(engine, stand_ins, self.memory)
        for failure in (self._host.failure, self.memory.failure, self._operations.failure):
            if failure is not None:
                raise failure
        samples = sum(tensor.nbytes for batch in batches for tensor in batch.tensors.values())
        return StepCosts(
            memory=replace(self.memory.memory(), window=samples, host=self._host.peak_bytes if self._offloads else 0),
            operations=on_line(self._fewer.operations(), self._operations.operations(), share),
            messages=on_line(self._fewer.messages(), self._operations.messages(), share),
            trained_parameters=engine.engaged().trained_parameters,
            tokens=_tokens(batches, engine.data_world),
            origin=origin,
            seconds_taken=time.perf_counter() - self._start,
        )


def _size(batch: MicroBatch) -> int:
    return next(iter(batch.tensors.values())).numel()


def _step(engine: Engine, batches: list[MicroBatch], memory: MemoryRecord) -> None:
    memory.begin_step()
    engine.statistics.keep()
    engine.forward_backward(batches)
    _note_held(memory, engine, ())
    with memory.part("optimizer"):
        engine.optimizer_step(1.0)
    _note_held(memory, engine, ())


def _note_held(memory: MemoryRecord, engine: Engine, batches: list[MicroBatch] | tuple[()]) -> None:
    memory.serves("activations", (tensor for batch in batches for tensor in batch.tensors.values()))
    for part, tensors in engine.held_tensors().items():
        memory.serves(part, tensors)


def _tokens(batches: list[MicroBatch], data_world: int) -> int | None:
    """Returns the tokens of a step over all ranks, padding included; None where samples have none."""
    rows = [batch.tensors["input_ids"].numel() for batch in batches if "input_ids" in batch.tensors]
    return sum(rows) * data_world if rows else None
