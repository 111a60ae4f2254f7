"""Fills in fields that a run file leaves out: from a foreign configuration, from the mesh, from the machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from drivetrain.config.engine_rules import foreign, is_read
from drivetrain.config.language import LanguageModel
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.config.workload import TextClassification

Block = TypeVar("Block", bound=BaseModel)


def resolved(run: RunConfig, machine: Machine) -> RunConfig:
    """Returns the run with the fields of its foreign configuration filled in, and one process a GPU where it states no
    number."""
    run = _with_processes(adopted(run), machine)
    if isinstance(run.workload, LanguageModel) and run.workload.data.packing and run.engine.needs_rows(run.devices):
        return _with_data(run, packing=False)
    is_auto = isinstance(run.workload, TextClassification) and run.workload.data.unpadded == "auto"
    if is_auto and (machine.device != "cpu" or why_padded(run) is not None):
        return _with_data(run, unpadded=False)
    return run


def why_padded(run: RunConfig) -> str | None:
    """Returns why texts cannot be packed, as far as the run file shows; None if nothing prevents it."""
    assert isinstance(run.workload, TextClassification), "a language model packs in a way of its own"
    if run.workload.data.padding == "fixed":
        return "padding is fixed"
    if not run.engine.takes_encoder_rows or run.engine.needs_rows(run.devices):
        return f"engine={run.engine.label} takes rows of one text each"
    return "compile=true would compile the model for each number of tokens" if run.compile is True else None


def _with_data(run: RunConfig, **update: Any) -> RunConfig:
    workload: Any = run.workload
    data = workload.data.model_copy(update=update)
    return run.model_copy(update={"workload": workload.model_copy(update={"data": data})})


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
