"""Fills in fields that a run file leaves out: from a foreign configuration, from the mesh, from the machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from drivetrain.config.engine_rules import foreign, is_read
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig

Block = TypeVar("Block", bound=BaseModel)


def resolved(run: RunConfig, machine: Machine) -> RunConfig:
    """Returns the run with the fields of its foreign configuration filled in, and one process a GPU where it states no
    number."""
    run = _with_processes(adopted(run), machine)
    return run.model_copy(update={"workload": run.workload.resolved(run, machine)})


def _with_processes(run: RunConfig, machine: Machine) -> RunConfig:
    if run.processes is not None or not run.engine.takes_processes:
        return run
    for _, found in foreign(run):
        if "processes" in found.settings:
            return run.model_copy(update={k: v for k, v in found.settings.items() if k in ("processes", "nodes")})
    return run.model_copy(update={"processes": run.engine.default_processes(machine, run.nodes)})


def adopted(run: RunConfig) -> RunConfig:
    """Returns the fields that the run file leaves out and a foreign configuration sets."""
    for _, found in foreign(run):
        batch_given = run.batch_size is not None or run.batch_size_per_device is not None
        for field in sorted(found.settings, key=lambda name: name != "precision"):  # which decides on the scaler
            own = field.startswith(("engine.", "processes", "nodes"))
            if own or not is_read(field, run) or (field.startswith("batch_size") and batch_given):
                continue
            run = _with_field(run, field.split("."), found.settings[field])
    return run


def _with_field(block: Block, path: Sequence[str], value: Any) -> Block:
    """Returns the block with the field set, unless the run file sets it."""
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
