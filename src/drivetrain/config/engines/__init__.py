"""Engines spread a run over devices. Each kind has a block of the run file, with a `name`, that answers for itself.

A new engine is a block here (a class of `block.EngineBlock`, listed in KINDS and in EngineConfig) and a class in
`drivetrain.engines`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from drivetrain.config.base import JsonSchemaMadeLate
from drivetrain.config.engines.accelerated import DRIVER, ZERO, AccelerateEngine
from drivetrain.config.engines.block import EngineBlock, Traits
from drivetrain.config.engines.mesh import LABEL, MeshEngine, of_label
from drivetrain.config.engines.plain import DdpEngine, DpEngine, FsdpEngine, SingleEngine
from drivetrain.config.engines.zero import DeepspeedEngine

__all__ = [
    "DRIVER",
    "ENGINES",
    "KINDS",
    "SHORT",
    "SINGLE",
    "AccelerateEngine",
    "DdpEngine",
    "DeepspeedEngine",
    "DpEngine",
    "EngineBlock",
    "EngineConfig",
    "FsdpEngine",
    "MeshEngine",
    "SingleEngine",
    "Traits",
    "block_of",
]

KINDS: dict[str, type[EngineBlock]] = {
    "single": SingleEngine,
    "dp": DpEngine,
    "ddp": DdpEngine,
    "fsdp": FsdpEngine,
    "deepspeed": DeepspeedEngine,
    "accelerate": AccelerateEngine,
    "mesh": MeshEngine,
}
ENGINES: dict[str, Traits] = {name: kind.TRAITS for name, kind in KINDS.items()}
SINGLE = SingleEngine()

# what a run file or an override may say for a whole block
SHORT: dict[str, dict[str, Any]] = {
    **ZERO,
    **{f"accelerate-{name}": {"name": "accelerate", "driver": name} for name in ("ddp", "fsdp", "deepspeed")},
    **{f"accelerate-{name}": {"name": "accelerate", "driver": block} for name, block in ZERO.items()},
}


def block_of(name: str) -> dict[str, Any]:
    """Expands a short name: `engine: ddp` is short for `engine: {name: ddp}`; so are the names in SHORT and a mesh's
    label."""
    return SHORT.get(name) or of_label(name) or {"name": name}


def _block(given: Any) -> Any:
    return block_of(given) if isinstance(given, str) else given


EngineConfig = Annotated[
    Annotated[
        SingleEngine | DpEngine | DdpEngine | FsdpEngine | DeepspeedEngine | AccelerateEngine | MeshEngine,
        Field(discriminator="name"),
    ],
    BeforeValidator(_block),
    JsonSchemaMadeLate(
        lambda: {
            "anyOf": [
                {"enum": [*ENGINES, *SHORT]},
                {"type": "string", "pattern": f"^{LABEL}$"},
                *(kind.model_json_schema() for kind in KINDS.values()),
            ]
        }
    ),
]
