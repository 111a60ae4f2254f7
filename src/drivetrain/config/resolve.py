"""What a run file leaves out: as a foreign configuration says, as the mesh asks for, as the machine has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from drivetrain.config.engine import DpEngine
from drivetrain.config.engine_rules import foreign, is_read
from drivetrain.config.language import LanguageModel
from drivetrain.config.machine import Machine
from drivetrain.config.mesh import MeshEngine
from drivetrain.config.run import RunConfig

Block = TypeVar("Block", bound=BaseModel)


def resolved(run: RunConfig, machine: Machine) -> RunConfig:
    """What the run file leaves out: as a foreign configuration says; processes else one a GPU."""
    run = _with_processes(adopted(run), machine)
    data = run.workload.data if isinstance(run.workload, LanguageModel) else None
    if data is None or not data.packing or not needs_rows(run):
        return run
    padded = run.workload.model_copy(update={"data": data.model_copy(update={"packing": False})})
    return run.model_copy(update={"workload": padded})


def needs_rows(run: RunConfig) -> bool:
    """Whether each sample has to be a row of its own: dp deals rows to its replicas, cp cuts each of them."""
    cuts = isinstance(run.engine, MeshEngine) and run.engine.cp > 1
    return cuts or (isinstance(run.engine, DpEngine) and run.devices > 1)


def _with_processes(run: RunConfig, machine: Machine) -> RunConfig:
    if run.processes is not None or run.engine.name == "single":
        return run
    for _, found in foreign(run):
        if "processes" in found.settings:
            return run.model_copy(update={k: v for k, v in found.settings.items() if k in ("processes", "nodes")})
    if isinstance(run.engine, MeshEngine):
        return run.model_copy(update={"processes": _of_the_mesh(run, run.engine, machine)})
    return run.model_copy(update={"processes": machine.device_count if machine.device == "cuda" else 1})


def _of_the_mesh(run: RunConfig, engine: MeshEngine, machine: Machine) -> int:
    """As many as the degrees ask for; all GPUs where dp was left out and they can be used."""
    here = machine.device_count if machine.device == "cuda" else 1
    if engine.dp is None and (here * run.nodes) % engine.beside_data == 0:
        return here
    return max(1, engine.least_world // run.nodes)


def adopted(run: RunConfig) -> RunConfig:
    """Fields that the run file leaves out and a foreign configuration gives."""
    for _, found in foreign(run):
        batch_given = run.batch_size is not None or run.batch_size_per_device is not None
        for field in sorted(found.settings, key=lambda name: name != "precision"):  # which decides on the scaler
            own = field.startswith(("engine.", "processes", "nodes"))
            if own or not is_read(field, run) or (field.startswith("batch_size") and batch_given):
                continue
            run = _with_field(run, field.split("."), found.settings[field])
    return run


def _with_field(block: Block, path: Sequence[str], value: Any) -> Block:
    """The block with a field set, if it was not given."""
    name, *below = path
    if below:
        inner = getattr(block, name)
        changed: Any = _with_field(inner, below, value) if isinstance(inner, BaseModel) else inner
    elif name in block.model_fields_set and not ("batch_size" in name and getattr(block, name) is None):
        return block
    else:
        try:
            changed = getattr(type(block).model_validate({**block.model_dump(), name: value}), name)
        except ValidationError:
            return block  # the rule that compares the two tells it
    return block if changed == getattr(block, name) else block.model_copy(update={name: changed})
