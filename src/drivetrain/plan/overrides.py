"""The words after `drivetrain train run.yaml` that lead from the user's run to another one."""

from __future__ import annotations

import json
import math
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
    """Returns the overrides: the engine always, other fields where they differ and have an effect."""
    found = [f"engine={engine_text(run.engine)}"]
    for name in FIELDS:
        value = getattr(run, name)
        if name == "micro_batch_size" and base.micro_batch_size is None and _bounds_nothing(run):
            continue
        if value != getattr(base, name) and not (name == "processes" and not run.engine.takes_processes):
            found.append(f"{name}={json.dumps(value) if not isinstance(value, str) else value}")
    return tuple(found)


def _bounds_nothing(run: RunConfig) -> bool:
    """Returns whether a rank's samples are cut as they are without a micro_batch_size: it takes all of them, and is not
    in place of the bound in tokens that packed samples have on a CPU."""
    share = math.ceil(run.step_samples / run.data_parallel_size)
    is_bounded = run.micro_batch_tokens is not None or not run.workload.is_packed
    return run.engine.stages == 1 and run.micro_batch >= share and is_bounded


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
