"""The words after `drivetrain train run.yaml` that lead from the user's run to another one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from drivetrain.config.engines import ENGINE, EngineBlock
from drivetrain.config.load import resolve_key
from drivetrain.config.run import RunConfig

FIELDS = (
    *("precision", "processes", "nodes", "batch_size", "batch_size_per_device"),
    *("recompute", "offload_activations", "micro_batch_size"),
)


def overrides_of(run: RunConfig, base: RunConfig) -> tuple[str, ...]:
    """Returns the overrides: the engine always, other fields where they differ."""
    found = [f"engine={engine_text(run.engine)}"]
    for name in FIELDS:
        value = getattr(run, name)
        if value != getattr(base, name) and not (name == "processes" and not run.engine.takes_processes):
            found.append(f"{name}={json.dumps(value) if not isinstance(value, str) else value}")
    return tuple(found)


def way_in_words(run: RunConfig) -> str:
    """Returns what a plan's ways differ in: engine, precision, and what saves memory."""
    found = [f"engine={engine_text(run.engine)}", f"precision={run.precision}"]
    found += [f"{name}=true" for name in ("recompute", "offload_activations") if getattr(run, name)]
    return " ".join([*found, *([] if run.micro_batch_size is None else [f"micro_batch_size={run.micro_batch_size}"])])


def after(own: Sequence[str], added: Sequence[str]) -> tuple[str, ...]:
    """Returns the overrides of a row after the user's own, without those of the user that the row's replace."""
    replaced = {each.partition("=")[0] for each in added}

    def is_kept(override: str) -> bool:
        path = resolve_key(override.partition("=")[0])
        return not any(".".join(path[:length]) in replaced for length in range(1, len(path) + 1))

    return (*(each for each in own if is_kept(each)), *added)


def engine_text(engine: EngineBlock) -> str:
    """Returns the engine's short name where that stands for the whole block, else the block as YAML on one line."""
    try:
        if ENGINE.validate_python(engine.label) == engine:
            return engine.label
    except ValidationError:  # a label that is no short name
        pass
    block = {"name": engine.name, **engine.model_dump(mode="json", exclude_defaults=True, exclude_none=True)}
    return "{" + ", ".join(f"{name}: {_yaml(value)}" for name, value in block.items()) + "}"


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) and value.isidentifier() else json.dumps(value, ensure_ascii=False)
