"""Engines: how a run is spread over devices. One block a kind, told apart by `name`; beside them what each can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from drivetrain.config.base import Frozen, doc


class SingleEngine(Frozen):
    name: Literal["single"] = doc("One process on one device", "single")


class DpEngine(Frozen):
    name: Literal["dp"] = doc("nn.DataParallel: one process, a replica on each of its GPUs", "dp")
    replicas: int | None = doc("Replicas of the model; left out, as many as processes says", None, gt=0)


class DdpEngine(Frozen):
    name: Literal["ddp"] = doc("DistributedDataParallel: a process and a copy of the model for each device", "ddp")
    shard_optimizer: bool = doc("ZeRO-1: each rank keeps its share of the optimizer's state", False)
    gradient_compression: Literal["none", "fp16", "bf16"] = doc("Dtype gradients are exchanged in", "none")
    bucket_mb: float = doc("MiB of gradients exchanged at once", 25.0, gt=0)
    static_graph: bool = doc("The model does the same in every step (quicker with recompute)", False)
    find_unused: bool = doc("Some parameters get no gradient in some steps", False)


class FsdpEngine(Frozen):
    name: Literal["fsdp"] = doc("FSDP2 (fully_shard): parameters, gradients and optimizer state sharded", "fsdp")
    reshard: bool = doc("Free gathered parameters after forward (ZeRO-3); false keeps them to backward (ZeRO-2)", True)
    hybrid: int | None = doc("Shard over so many ranks and replicate over the others (HSDP)", None, gt=1)
    offload: bool = doc("Keep parameters, gradients and optimizer state in CPU memory", False)
    wrap: Literal["block", "size"] | list[str] = doc(
        "What is gathered at once: block (repeated modules), size, or module classes, e.g. [Linear, Conv2d]", "block"
    )
    wrap_min_parameters: int = doc("wrap=size: parameters from which on a module is gathered apart", 1_000_000, gt=0)
    meta: bool = doc("Build the model on the first rank only; the others get their shards from it", False)


@dataclass(frozen=True)
class Traits:
    """What an engine can do. refuses: run-file field → why this engine cannot have it set."""

    title: str
    spreads: bool  # over processes
    refuses: Mapping[str, str] = field(default_factory=dict)


ENGINES: dict[str, Traits] = {
    "single": Traits("one process, one device", spreads=False),
    "dp": Traits(
        "nn.DataParallel",
        spreads=False,
        refuses={
            "compile": "nn.DataParallel copies the model for every step, and each copy would be compiled again",
            "recompute": "the recomputed forward would run on the original's weights instead of the replica's",
        },
    ),
    "ddp": Traits("DistributedDataParallel", spreads=True),
    "fsdp": Traits("FSDP2 (fully_shard)", spreads=True),
}


def _block(given: Any) -> Any:
    """`engine: single` is short for `engine: {name: single}`."""
    return {"name": given} if isinstance(given, str) else given


_KINDS = (SingleEngine, DpEngine, DdpEngine, FsdpEngine)

EngineConfig = Annotated[
    Annotated[SingleEngine | DpEngine | DdpEngine | FsdpEngine, Field(discriminator="name")],
    BeforeValidator(_block),
    WithJsonSchema({"anyOf": [{"enum": list(ENGINES)}, *(kind.model_json_schema() for kind in _KINDS)]}),
]
