"""What an engine cannot do: from its table, from its options, and from the foreign configuration it was given."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from drivetrain.config import accelerate, deepspeed, mesh
from drivetrain.config.engine import (
    ENGINES,
    AccelerateEngine,
    DdpEngine,
    DeepspeedEngine,
    FsdpEngine,
    driving,
    label,
    traits,
)
from drivetrain.config.files import read_json
from drivetrain.config.machine import Machine
from drivetrain.config.mesh import MeshEngine
from drivetrain.config.optimizer_rules import optimizer_problems, optimizer_problems_here
from drivetrain.config.run import RunConfig
from drivetrain.config.translation import Note, Translation, agree
from drivetrain.config.workload import UserModule
from drivetrain.errors import Problem, UserError


def engine_problems(run: RunConfig) -> Iterator[Problem]:
    """Whatever the machine."""
    yield from _from_the_table(run)
    engine, where = driving(run.engine), _where(run)
    if isinstance(engine, FsdpEngine) and engine.hybrid and run.world_size % engine.hybrid:
        why = f"the world size ({run.world_size}) is no multiple of the shards ({engine.hybrid})"
        yield Problem(f"{where}.hybrid", why, "give a divisor of processes * nodes")
    if isinstance(engine, DeepspeedEngine):
        yield from _of_deepspeed(run, engine, where)
    yield from optimizer_problems(run)
    if isinstance(run.engine, AccelerateEngine):
        yield from _of_accelerate(engine)
    if isinstance(engine, MeshEngine):
        yield from _of_a_mesh(run, engine, where)
    for field, translation in foreign(run):
        yield from _foreign_problems(run, field, translation)


def engine_problems_here(run: RunConfig, machine: Machine) -> Iterator[Problem]:
    """On this machine."""
    yield from optimizer_problems_here(run, machine)
    engine, where = driving(run.engine), _where(run)
    if isinstance(engine, DdpEngine) and engine.gradient_compression == "bf16" and machine.device == "cpu":
        yield Problem(f"{where}.gradient_compression", "DDP compresses to bf16 between GPUs only", "give fp16 or none")
    if isinstance(engine, DeepspeedEngine) and run.precision == "fp16-master" and machine.device == "cpu":
        yield Problem("precision", "DeepSpeed has no fp16 on a CPU", "take bf16-master, or engine=single or ddp")
    if machine.packages is not None:
        for package in sorted({run.engine.name, engine.name} & {"deepspeed", "accelerate"} - machine.packages):
            yield Problem("engine", f"{package} is not installed", f"pip install 'drivetrain[{package}]'")


def is_default(run: RunConfig, field: str) -> bool:
    """Whether a (dotted) field has the value it has when left out."""
    *blocks, name = field.split(".")
    block: BaseModel = functools.reduce(getattr, blocks, run)
    return bool(getattr(block, name) == type(block).model_fields[name].get_default(call_default_factory=True))


def _where(run: RunConfig) -> str:
    return "engine.driver" if isinstance(run.engine, AccelerateEngine) else "engine"


def _from_the_table(run: RunConfig) -> Iterator[Problem]:
    name, found = label(run.engine), traits(run.engine)
    for field, why in found.refuses.items():
        if not is_default(run, field) and getattr(run, field) is not False:
            yield Problem(field, f"engine={name} cannot have it: {why}", f"leave it out, or take engine={_with(field)}")
    if run.precision in found.lacks:
        why = f"engine={name} has no {run.precision}: {found.lacks[run.precision]}"
        yield Problem("precision", why, f"take another precision, or engine={_with_precision(run.precision)}")
    if run.nodes > 1 and not found.spreads:
        yield Problem("nodes", f"{run.nodes} were given, but engine={name} runs in one process", "take engine=ddp")


def _with(field: str) -> str:
    return " or ".join(name for name, found in ENGINES.items() if field not in found.refuses)


def _with_precision(precision: str) -> str:
    return " or ".join(name for name, found in ENGINES.items() if precision not in found.lacks)


# --- deepspeed and accelerate ----------------------------------------------------------------------------------------


def _of_deepspeed(run: RunConfig, engine: DeepspeedEngine, where: str) -> Iterator[Problem]:
    places = {"offload_optimizer": (engine.offload_optimizer, 1), "offload_parameters": (engine.offload_parameters, 3)}
    for field, (place, least) in places.items():
        if place != "none" and engine.stage < least:
            why = f"{place} was given, but stage {engine.stage} shards nothing of it"
            yield Problem(f"{where}.{field}", why, f"give stage={least} or more, or leave it out")
        if place == "nvme" and engine.nvme_path is None:
            yield Problem(f"{where}.nvme_path", f"is required with {field}=nvme", "give a folder on that disk")
        if place == "nvme" and engine.stage < 3:
            yield Problem(
                f"{where}.{field}", f"DeepSpeed uses the disk at stage 3 only, not {engine.stage}", "give cpu"
            )
    if engine.offload_parameters == "nvme" and not run.precision_spec.cast:
        why = f"DeepSpeed rounds parameters on a disk to 16 bits, which {run.precision} does not mean"
        yield Problem(f"{where}.offload_parameters", why, "give cpu, or precision=bf16-master")
    if engine.stage == 0 and run.precision_spec.cast:
        why = f"at stage 0 DeepSpeed accumulates and sums gradients in 16 bits, which {run.precision} does in fp32"
        yield Problem("precision", why, "give stage=1 or more, or bf16-mixed")


def _of_accelerate(engine: Any) -> Iterator[Problem]:
    if isinstance(engine, DdpEngine) and engine.shard_optimizer:
        yield Problem("engine.driver.shard_optimizer", "Accelerate has no such thing", "take engine=ddp, or zero1")
    if isinstance(engine, FsdpEngine) and engine.meta:
        yield Problem("engine.driver.meta", "Accelerate does it for from_pretrained only", "take engine=fsdp")


def _of_a_mesh(run: RunConfig, engine: MeshEngine, where: str) -> Iterator[Problem]:
    if run.processes is not None:  # else they are as many as it asks for
        yield from mesh.arithmetic(engine, run.world_size, where)
    yield from mesh.options_without_degree(engine, run.world_size, where)
    if run.micro_batch_limit is not None and (run.batch_size is not None or run.batch_size_per_device is not None):
        share = -(-run.global_batch // run.data_parallel_size)
        yield from mesh.idle_stages(engine, share, run.micro_batch_limit, "micro_batch_size")
    if engine.schedule == "zero_bubble" and run.compile is True:
        why = "it takes backward passes apart, which PyTorch cannot do with compiled blocks"
        yield Problem(f"{where}.schedule", why, "leave compile out, or take 1f1b")
    if not isinstance(run.workload, UserModule):
        config = _config_of(run.workload.model)
        yield from mesh.model_problems(engine, config, where)


def _config_of(model: Any) -> dict[str, Any]:
    """A model's config as far as it is seen without the hub; what is wrong with a folder is told when it is read."""
    if model.path is None:
        return model.config or {}
    file = Path(model.path).expanduser() / "config.json"
    try:
        return read_json(file) if file.is_file() else {}
    except UserError:
        return {}


def foreign(run: RunConfig) -> Iterator[tuple[str, Translation]]:
    """The configurations of other software that the run was given, by field."""
    if isinstance(run.engine, AccelerateEngine) and run.engine.config is not None:
        yield "engine.config", accelerate.translate(run.engine.config)
    elif isinstance(run.engine, DeepspeedEngine) and run.engine.config is not None:
        yield "engine.config", deepspeed.translate(run.engine.config)
    elif isinstance(driving(run.engine), DeepspeedEngine) and driving(run.engine).config is not None:
        yield "engine.driver.config", deepspeed.translate(driving(run.engine).config)


def is_read(field: str, run: RunConfig) -> bool:
    """Whether a field that a foreign configuration gives has an effect: the scaler's only where losses are scaled."""
    return run.precision_spec.scaled or not field.startswith("scaler.")


def _foreign_problems(run: RunConfig, where: str, found: Translation) -> Iterator[Problem]:
    for note in found.with_fate("refused", "later"):
        yield Problem(f"{where}.{note.key}", _why(note), "take it out, or correct it")
    for notes in found.conflicts():
        said = ", ".join(f"{note.key} says {note.value}" for note in notes)
        yield Problem(f"{where} ({notes[0].to})", f"{said}, and they mean one thing", "keep one of them")
    for field, wanted in found.settings.items():
        if field == "engine.name" or (field.startswith("engine.") and where != "engine.config"):
            continue
        if not is_read(field, run):
            continue
        actual = _actual(run, field)
        if not agree(wanted, actual):
            why = f"it says {field}={wanted}, but the run file says {actual}"
            yield Problem(f"{where} ({field})", why, "make them agree, or write auto")


def _why(note: Note) -> str:
    return f"not built yet: {note.why}" if note.fate == "later" else note.why


def _actual(run: RunConfig, field: str) -> Any:
    """The run's value of a field that a foreign configuration names."""
    if field == "batch_size":
        return run.global_batch
    if field == "batch_size_per_device":
        return run.global_batch / run.data_parallel_size
    if field == "micro_batch_size":
        return run.micro_batch_limit or run.global_batch / run.data_parallel_size
    root: Any = run
    for part in field.split("."):
        root = driving(root) if part != "name" and isinstance(root, AccelerateEngine) else root
        root = root.get(part) if isinstance(root, dict) else getattr(root, part)
    return str(root) if field == "engine.nvme_path" else root
