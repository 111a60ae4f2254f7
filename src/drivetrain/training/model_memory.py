"""Refuses a model whose weights alone cannot fit into memory, before it is built.

Only what surely cannot work is refused: the weights, without gradients, optimizer state and activations, against all
memory that could be free, swap included. Building makes fp32 weights in CPU memory, in every process that builds the
whole model; a process that was ended for memory says nothing, and takes other programs of the machine with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from drivetrain.config.machine import Machine
from drivetrain.config.quantised import QuantisedBase
from drivetrain.config.run import RunConfig
from drivetrain.distributed.rng import restore_rng_state, rng_state
from drivetrain.errors import Problem, UserError
from drivetrain.memory.limit import attainable_memory
from drivetrain.models.parameter_count import ParameterCount, count_parameters

BUILT = 4  # bytes of a parameter while a model is built: fp32
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
CODES = {"nf4": 0.5, "int4": 0.5, "int8": 1.0, "int8-torchao": 1.0}  # bytes of a weight, without scales


def counted(run: RunConfig) -> ParameterCount | None:
    """Returns how many parameters the run's model has, if that is known before it is built."""
    before = rng_state()
    count = count_parameters(run.workload)
    restore_rng_state(before)
    return count


def refuse_too_large(run: RunConfig, machine: Machine, training: bool, count: ParameterCount | None) -> None:
    """Raises UserError if the weights cannot fit into this machine's memory, or into that of a device."""
    if count is None:
        return
    written = training and machine.device == "cpu"  # updates write to the weights where they were loaded
    host = () if _is_mapped(run) and not written else _of_the_host(run, count)
    problems = [*host, *_of_the_device(run, machine, count)]
    if problems:
        raise UserError(problems)


def _is_mapped(run: RunConfig) -> bool:
    """Returns whether the weights are a folder's in fp32: they are mapped, shared by all ranks, and take no memory that
    the kernel could not give back until they are written to."""
    known, base = run.workload.known_config, run.workload.base
    dtype = str(known.get("dtype") or known.get("torch_dtype") or "float32")
    return base is not None and dtype == "float32" and any(Path(base).expanduser().glob("*.safetensors"))


def _of_the_host(run: RunConfig, count: ParameterCount) -> Iterator[Problem]:
    ranks = run.world_size // run.nodes if run.engine.traits.spreads else 1
    copies = run.engine.whole_copies(ranks)
    one = _bytes(count, BUILT, run.quantised_base)
    free = attainable_memory()
    if one * copies <= free:
        return
    if copies > 1:
        why = f"{copies} ranks would each build {_gib(one)} of weights in CPU memory, {_gib(one * copies)}"
    else:
        why = f"the model's {count.all:,} parameters take {_gib(one)} of CPU memory while they are built"
    field = "engine" if copies > 1 else "workload.model"
    yield Problem(field, f"{why}; this machine has {_gib(free)} free, with swap", _remedy(run, one, copies, free))


def _remedy(run: RunConfig, one: int, copies: int, free: int) -> str:
    """Returns what helps: fewer copies where one fits, codes where the model comes from a folder, else another
    machine."""
    fixes = []
    if copies > 1 and one <= free:
        fixes += [f"give engine=fsdp with engine.meta=true (one copy, {_gib(one)})", f"processes={free // one} at most"]
    if _has_folder(run) and run.quantised_base is None:
        fixes.append("an adapter with quantised_base=nf4 (an eighth of it)")
    return ", or ".join([*fixes, "take a smaller model, or a machine with more memory"])


def _of_the_device(run: RunConfig, machine: Machine, count: ParameterCount) -> Iterator[Problem]:
    """Yields the problem of a GPU that is smaller than the weights, which the engine puts there whole."""
    if machine.device != "cuda" or not run.engine.whole_on_device:
        return
    held = _bytes(count, BYTES[run.precision_spec.parameters], run.quantised_base)
    if held > machine.memory_bytes:
        why = f"engine={run.engine.label} puts {_gib(held)} of weights on each device; {machine.device_name} has "
        fix = "take engine=fsdp, which shards them" + (
            ", or an adapter with quantised_base" if _has_folder(run) else ""
        )
        yield Problem("engine", f"{why}{_gib(machine.memory_bytes)}", fix)


def _has_folder(run: RunConfig) -> bool:
    return run.workload.base is not None


def _bytes(count: ParameterCount, each: int, codes: QuantisedBase | None) -> int:
    """Returns the bytes of the weights, `each` a parameter; of a quantised base, whose linear weights are read one by
    one, those of the codes."""
    if codes is None:
        return count.all * each
    return (count.all - count.linear) * each + int(count.linear * CODES[codes.format])


def _gib(size: float) -> str:
    return f"{size / 2**30:,.{0 if size >= 10 * 2**30 else 1}f} GiB"
