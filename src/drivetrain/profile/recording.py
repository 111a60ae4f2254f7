"""Takes a few steps of a run under torch.profiler, through the run's own loop and engine, on every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.data.loading_time import workers_for
from drivetrain.distributed.communicator import Communicator
from drivetrain.measure.throughput import Stopwatch
from drivetrain.numerics.torch_precision import arithmetic
from drivetrain.profile.breakdown import breakdown
from drivetrain.profile.spans import MODULE, PART, spans_of
from drivetrain.runtime.hardware import torch_device
from drivetrain.training.assemble import assemble
from drivetrain.training.auto_settings import order_of, total_steps_of
from drivetrain.training.observed_steps import ObservedSteps
from drivetrain.training.progress import Progress

WARM_UP = 3  # steps that are not timed: caches, allocator and loader workers fill
ITSELF = "(the model itself)"
WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}  # names that engines put around a model or a block
TRACE = "rank-{}.trace.json.gz"


class NamedParts(Stopwatch):
    """Names the parts of a step to the profiler too."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        with super().part(name), record_function(PART + name):
            yield


def record(run: RunConfig, machine: Machine, steps: int, folder: Path | None) -> dict[str, Any]:
    """Takes steps without and then with the profiler, on this rank; all ranks call it.

    folder: gets a trace of each rank that Perfetto reads; None: only plain steps are taken, and "ranks" is empty.
    Returns {"steps": of each kind, "samples": in a step, "lengthened": whether the run has fewer steps, "workers": of
    the loader, "plain_seconds" and "profiled_seconds": of a step on the slowest rank, "ranks": a `breakdown` of each}.
    """
    with arithmetic(run.precision_spec, machine):
        communicator, parts = Communicator(), NamedParts(torch_device(machine))
        workload, engine = assemble(run, machine, communicator, training=True, part=parts.part)
        try:
            phases = _Phases(machine, steps, profiles=folder is not None)
            # a run that is shorter goes on as a longer one would: its steps take the same time
            length = run.loop.model_copy(update={"steps": phases.last, "epochs": None})
            longer = run.model_copy(update={"loop": length})
            order = order_of(run, workload)
            taken = ObservedSteps(longer, machine, workload, engine, order, parts, workers=True)
            taken.go(Progress(), phases.last, after_step=phases.after_step)
            found: list[dict[str, Any]] = []
            if folder is not None:
                phases.profiler.export_chrome_trace(str(folder / TRACE.format(communicator.rank)))
                found = communicator.all_gather(breakdown(spans_of(phases.profiler.events() or ()), phases.steps))
            both = communicator.all_gather((phases.plain, phases.profiled))
        finally:
            engine.close()
        plain, profiled = (max(each) / phases.steps for each in zip(*both, strict=True))
        auto = run.loader.workers == "auto"
        return {
            "steps": phases.steps,
            "samples": run.global_batch,
            "lengthened": total_steps_of(run, order) < phases.last,
            "workers": workers_for(workload.train) if auto else run.loader.workers,
            "plain_seconds": plain,
            "profiled_seconds": profiled,
            "ranks": found,
        }


class _Phases:
    """Steps that warm up, then as many plain ones as are asked for, then as many under the profiler: in one pass of the
    loop, so that loader workers go on."""

    def __init__(self, machine: Machine, steps: int, profiles: bool) -> None:
        self.steps, self.last = steps, WARM_UP + steps * (2 if profiles else 1)
        self.plain = self.profiled = 0.0
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if machine.device == "cuda" else [])]
        self.profiler = profile(activities=activities)
        self._on_gpu, self._profiles, self._names = machine.device == "cuda", profiles, ExitStack()
        self._start = time.perf_counter()

    def after_step(self, step: int) -> None:
        if step == WARM_UP:
            self._start = self._now()
        elif step == WARM_UP + self.steps:
            self.plain = self._now() - self._start
            if self._profiles:
                self._names.enter_context(named_modules())
                self.profiler.start()
                self._start = self._now()
        elif step == self.last:
            self.profiled = self._now() - self._start
            self.profiler.stop()
            self._names.close()

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


@contextmanager
def named_modules() -> Iterator[None]:
    """Names each module's forward pass to the profiler while the block runs."""
    names: dict[nn.Module, str] = {}
    open_ranges: list[tuple[nn.Module, ExitStack]] = []

    def begin(module: nn.Module, _: Any) -> None:
        if module not in names:
            names.update(names_in(module))
        stack = ExitStack()
        stack.enter_context(record_function(MODULE + names[module]))
        open_ranges.append((module, stack))

    def end(module: nn.Module, _: Any, __: Any) -> None:
        while open_ranges:  # a module that ended by an exception left its range open
            opened, stack = open_ranges.pop()
            stack.close()
            if opened is module:
                return

    handles = [register_module_forward_pre_hook(begin), register_module_forward_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def names_in(model: nn.Module) -> dict[nn.Module, str]:
    """Returns the name of each module without engines' wrappers. Numbered siblings of one class are blocks alike, and
    share a name: layers.*.mlp; the parts of Sequential(Linear, ReLU, Linear) keep their numbers."""
    found = {model: ITSELF}

    def walk(module: nn.Module, prefix: str) -> None:
        children = list(module.named_children())
        alike = len({type(child) for _, child in children}) == 1
        for name, child in children:
            shown = "" if name in WRAPPERS else "*" if name.isdigit() and alike else name
            path = ".".join(filter(None, (prefix, shown)))
            if child not in found:
                found[child] = path or ITSELF
                walk(child, path)

    walk(model, "")
    return found
