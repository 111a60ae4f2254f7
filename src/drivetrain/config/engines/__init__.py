"""Engines spread a run over devices. Each kind has a block of the run file, with a `name`, that answers for itself.

A new engine is a file here, with a block (a class of `block.EngineBlock` that has TRAITS), and a class in
`drivetrain.engines`. Every file of this folder is imported, so that no list has to be kept beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import BeforeValidator, Field, TypeAdapter

from drivetrain.config.base import JsonSchemaMadeLate
from drivetrain.config.engines.accelerated import DRIVER, ZERO, AccelerateEngine
from drivetrain.config.engines.block import EngineBlock, Traits
from drivetrain.config.engines.mesh import LABEL, MeshEngine, of_label
from drivetrain.config.engines.plain import DdpEngine, DpEngine, FsdpEngine, SingleEngine
from drivetrain.config.engines.zero import DeepspeedEngine

__all__ = [
    "DRIVER",
    "ENGINE",
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


def _blocks(base: type[EngineBlock]) -> Iterator[type[EngineBlock]]:
    """Yields the classes of blocks that have TRAITS, in the order in which their files were imported."""
    for kind in base.__subclasses__():
        if "TRAITS" in vars(kind):
            yield kind
        yield from _blocks(kind)


for _file in iter_modules(__path__, f"{__name__}."):
    import_module(_file.name)
KINDS: dict[str, type[EngineBlock]] = {kind.model_fields["name"].default: kind for kind in _blocks(EngineBlock)}
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


if TYPE_CHECKING:
    AnyBlock = EngineBlock
else:
    AnyBlock = Union[tuple(KINDS.values())]  # noqa: UP007 (a union of classes that are known only here)
EngineConfig = Annotated[
    Annotated[AnyBlock, Field(discriminator="name")],
    BeforeValidator(_block),
    JsonSchemaMadeLate(
        lambda: {
            "anyOf": [
                {"enum": [*ENGINES, *SHORT, "auto"]},
                {"type": "string", "pattern": f"^{LABEL}$"},
                *(kind.model_json_schema() for kind in KINDS.values()),
            ]
        }
    ),
]
ENGINE: TypeAdapter[EngineBlock] = TypeAdapter(EngineConfig)
