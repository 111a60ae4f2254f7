"""The one place that answers "does this combination work on this machine?", free of torch.

It reads the run and a `Machine` value, so that it also answers for a machine other than this one. (`notices` has
remarks on runs that work.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drivetrain.config.adapter import adapter_problems
from drivetrain.config.engine_rules import engine_problems, engine_problems_here
from drivetrain.config.machine import Machine
from drivetrain.config.numerics import numerics_problems
from drivetrain.config.optimizer_rules import optimizer_problems, optimizer_problems_here
from drivetrain.config.packages import package_problems
from drivetrain.config.precision import PRECISIONS
from drivetrain.config.quantisation_aware import quantisation_aware_problems
from drivetrain.config.quantised import quantised_base_problems
from drivetrain.config.resolve import resolved
from drivetrain.config.restarts import restart_problems
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem

ENGINE = "engine"  # the field of an engine that is not known


def check(run: RunConfig, machine: Machine) -> list[Problem]:
    """Returns every reason why this run cannot work on this machine."""
    return [*check_anywhere(run), *_check_here(run, machine)]


def check_anywhere(run: RunConfig, knows_engine: bool = True) -> list[Problem]:
    """Returns the reasons that hold on every machine. knows_engine: False where another engine stands in for one that
    is not known, whose own rules would report what the user never asked for."""
    of_the_run = (
        *(_batch, *([engine_problems] if knows_engine else []), optimizer_problems, restart_problems, _length),
        *(_workload, _adapter, _quantisation, _paths),
    )
    return [problem for rule in of_the_run for problem in rule(run)]


def _check_here(run: RunConfig, machine: Machine, knows_engine: bool = True) -> list[Problem]:
    of_the_machine = (
        *(_device, _precision, _processes, optimizer_problems_here),
        *([engine_problems_here] if knows_engine else []),
        package_problems,
    )
    return [problem for rule in of_the_machine for problem in rule(run, machine)]


def judged_anywhere(run: RunConfig, found: Sequence[Problem]) -> list[Problem]:
    """Returns the problems of a run on any machine, at most one a field. found: those of its file."""
    reported = _reported(found)
    return [*found, *_further(check_anywhere(run, ENGINE not in reported), reported)]


def judged(run: RunConfig, found: Sequence[Problem], machine: Machine) -> tuple[RunConfig, list[Problem]]:
    """Returns the run with its open fields filled in for this machine, and all problems, at most one a field."""
    reported = _reported(found)
    run, knows_engine = resolved(run, machine), ENGINE not in reported
    others = [*check_anywhere(run, knows_engine), *_check_here(run, machine, knows_engine)]
    return run, [*found, *_further(others, reported)]


def _further(problems: Sequence[Problem], reported: set[str]) -> list[Problem]:
    """Returns the problems of fields that are not reported already. One whose reason is the value of such a field
    ("workload.stage is pretrain") is left out too: that is the default, which the user never gave."""
    return [
        problem
        for problem in problems
        if problem.field not in reported and not any(f"{field} is " in problem.why for field in reported)
    ]


def _reported(found: Sequence[Problem]) -> set[str]:
    """Returns the fields that were taken out of a run, which are not reported missing too. Of an entry of a list these
    are also the entry and the list, which may be empty without it: rewards.0.use, rewards.0, rewards."""
    fields = set()
    for problem in found:
        parts = problem.field.split(".")
        first = next((place for place, part in enumerate(parts) if part.isdecimal()), len(parts))
        fields |= {".".join(parts[:end]) for end in range(first, len(parts) + 1)}
    return fields


# --- what cannot work ----------------------------------------------------------------------------------------------


def _device(run: RunConfig, machine: Machine) -> Iterator[Problem]:
    if run.device == "cuda" and machine.device != "cuda":
        yield Problem(
            "device", "cuda was given, but PyTorch sees no GPU here", "leave it out, or see what drivetrain doctor says"
        )


def _precision(run: RunConfig, machine: Machine) -> Iterator[Problem]:
    possible = [name for name in PRECISIONS if name not in run.engine.traits.lacks]
    works = ", ".join(name for name in possible if not list(precision_gap(name, machine)))
    for gap in precision_gap(run.precision, machine):
        yield Problem("precision", f"{run.precision} was given, but {gap}", f"works here: {works}")


def precision_gap(name: str, machine: Machine) -> Iterator[str]:
    """Yields what the machine lacks for a precision."""
    need = PRECISIONS[name].needs
    if machine.device not in need.devices:
        yield f"it exists on {' and '.join(need.devices)} only and this is {machine.device_name}"
    elif machine.device == "cuda" and machine.compute_capability is None and need.nvidia_only:
        yield f"it works on NVIDIA's GPUs only and this is {machine.device_name}"
    elif machine.compute_capability is not None and machine.compute_capability < need.compute_capability:
        have, ask = (".".join(map(str, c)) for c in (machine.compute_capability, need.compute_capability))
        yield f"{machine.device_name} has compute capability {have}; it needs {ask}"


def _batch(run: RunConfig) -> Iterator[Problem]:
    if (run.batch_size is None) == (run.batch_size_per_device is None):
        given = "neither was given" if run.batch_size is None else "both were given"
        yield Problem("batch_size", f"of batch_size and batch_size_per_device {given}", "give one of the two")
    elif run.global_batch < run.data_parallel_size:
        yield Problem(
            "batch_size",
            f"the batch ({run.global_batch}) < the devices that share it ({run.data_parallel_size})",
            "give at least one sample for each device",
        )
    if run.micro_batch_size == "auto" and run.micro_batch_tokens is not None:
        yield Problem("micro_batch_size", "auto looks for what micro_batch_tokens gives", "give one of the two")


def _processes(run: RunConfig, machine: Machine) -> Iterator[Problem]:
    wanted = run.devices // run.nodes
    if machine.device == "cuda" and wanted > machine.device_count:
        has = f"{machine.device_count} GPU{'s' * (machine.device_count != 1)}"
        yield Problem("processes", f"{wanted} were given, but the machine has {has}", "each rank takes one: give fewer")


def _length(run: RunConfig) -> Iterator[Problem]:
    yield from numerics_problems(run.numerics)
    if (run.loop.epochs is None) == (run.loop.steps is None):
        neither = run.loop.epochs is None
        given = "neither was given" if neither else "both were given"
        unsaid = "" if neither else "; loop.epochs=null (or loop.steps=null) takes back what the run file gives"
        yield Problem("loop", f"of epochs and steps {given}", f"give one of the two{unsaid}")
    if run.schedule.warmup_steps and run.schedule.warmup_ratio:
        yield Problem("schedule", "warmup_steps and warmup_ratio were both given", "give one of the two")
    if run.loop.steps is not None and run.schedule.warmup_steps > run.loop.steps:
        yield Problem(
            "schedule.warmup_steps",
            f"warmup_steps ({run.schedule.warmup_steps}) > loop.steps ({run.loop.steps})",
            "warm up over fewer steps",
        )


def _workload(run: RunConfig) -> Iterator[Problem]:
    return run.workload.problems(run)


def _paths(run: RunConfig) -> Iterator[Problem]:
    return run.workload.path_problems()


def _adapter(run: RunConfig) -> Iterator[Problem]:
    if run.quantised_base is not None:
        yield from quantised_base_problems(run.quantised_base, run.adapter is not None)
    if run.adapter is None:
        return
    if run.quantised_base is not None and any(adapter.pissa for adapter in run.adapter):
        why = "PiSSA changes the weights that it starts from, which quantised ones cannot follow"
        yield Problem("adapter.pissa", why, "leave it or quantised_base out")
    yield from adapter_problems(run.adapter)
    yield from run.workload.adapter_problems()
    if run.recompute and any(adapter.method == "prefix" for adapter in run.adapter):
        yield Problem("recompute", "a block that is computed twice would see the prefix twice", "leave it out")
    yield from run.engine.adapter_problems(run.adapter, run.compile is True)


def _quantisation(run: RunConfig) -> Iterator[Problem]:
    if run.quantised_base is not None and run.precision_spec.layers is not None:
        why = "quantised_base keeps codes and makes weights in 16 bits from them: no product would be in 8-bit floats"
        yield Problem("precision", why, "give bf16-mixed, or leave quantised_base out")
    if run.quantisation_aware is not None:
        has_codes = run.quantised_base is not None
        yield from quantisation_aware_problems(run.quantisation_aware, run.precision_spec, run.adapter or (), has_codes)
