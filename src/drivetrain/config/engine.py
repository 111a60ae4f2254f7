"""Engines: how a run is spread over devices. One block a kind, told apart by `name`; beside them what each can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, WithJsonSchema, model_validator

from drivetrain.config import accelerate, deepspeed
from drivetrain.config.base import Frozen, doc
from drivetrain.config.files import read_json, read_yaml
from drivetrain.config.mesh import LABEL, MeshEngine, of_label
from drivetrain.config.translation import Translation
from drivetrain.errors import UserError


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


def _read_file(reader: Callable[[Path], dict[str, Any]], given: Any) -> Any:
    """A path becomes what the file holds, so that a run keeps what it was started with."""
    try:
        return reader(Path(given)) if isinstance(given, str | Path) else given
    except UserError as error:
        raise ValueError(f"{error.problems[0].why}; {error.problems[0].fix}") from None


def _read(reader: Callable[[Path], dict[str, Any]]) -> BeforeValidator:
    return BeforeValidator(lambda given: _read_file(reader, given))


_FILE_OR_CONTENT = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]})
Place = Literal["none", "cpu", "nvme"]


class DeepspeedEngine(Frozen):
    name: Literal["deepspeed"] = doc("DeepSpeed's ZeRO: state sharded over the ranks, by stage", "deepspeed")
    stage: Literal[0, 1, 2, 3] = doc(
        "1 shards the optimizer's state, 2 gradients too, 3 parameters too, 0 nothing; left out, as config says", 2
    )
    offload_optimizer: Place = doc("Where the optimizer's state is kept: none (on the device), cpu or nvme", "none")
    offload_parameters: Place = doc("Stage 3: where parameters are kept: none (on the device), cpu or nvme", "none")
    nvme_path: Path | None = doc("Folder on the disk that nvme means", None)
    config: Annotated[dict[str, Any] | None, _read(read_json), _FILE_OR_CONTENT] = doc(
        "DeepSpeed's own JSON, a path or its content; `auto` is filled in from the run file", None
    )

    @model_validator(mode="before")
    @classmethod
    def _as_the_config_says(cls, given: Any) -> Any:
        config = _content(given, read_json)
        if config is None:
            return given
        return {**_own_fields(deepspeed.translate(config)), **given, "config": config}


def _content(given: Any, reader: Callable[[Path], dict[str, Any]]) -> dict[str, Any] | None:
    """What the `config` of a block holds; ValueError if its file cannot be read."""
    config = given.get("config") if isinstance(given, dict) else None
    return _read_file(reader, config) if isinstance(config, str | Path | dict) else None


def _own_fields(found: Translation) -> dict[str, Any]:
    """The engine's fields among those of a translation."""
    return {key.removeprefix("engine."): v for key, v in found.settings.items() if key.startswith("engine.")}


def _block(given: Any) -> Any:
    return block_of(given) if isinstance(given, str) else given


def block_of(name: str) -> dict[str, Any]:
    """`engine: ddp` is short for `engine: {name: ddp}`; so is each of SHORT, and a mesh's name in reports."""
    return SHORT.get(name) or of_label(name) or {"name": name}


_DRIVERS = (DdpEngine, FsdpEngine, DeepspeedEngine)
Driver = Annotated[
    Annotated[DdpEngine | FsdpEngine | DeepspeedEngine, Field(discriminator="name")],
    BeforeValidator(_block),
    WithJsonSchema({"anyOf": [{"type": "string"}, *(kind.model_json_schema() for kind in _DRIVERS)]}),
]
DRIVER: TypeAdapter[DdpEngine | FsdpEngine | DeepspeedEngine] = TypeAdapter(Driver)


def _with_folder(path: Path) -> dict[str, Any]:
    return accelerate.whole(read_yaml(path), path.parent)


class AccelerateEngine(Frozen):
    name: Literal["accelerate"] = doc("Hugging Face Accelerate wraps the model, by one of its drivers", "accelerate")
    driver: Driver = doc("ddp, fsdp or deepspeed, with that engine's options", DdpEngine())
    config: Annotated[dict[str, Any] | None, _read(_with_folder), _FILE_OR_CONTENT] = doc(
        "A YAML of `accelerate config`, a path or its content, which says the driver", None
    )

    @model_validator(mode="before")
    @classmethod
    def _driver_of_the_config(cls, given: Any) -> Any:
        config = _content(given, _with_folder)
        if config is None:
            return given
        found = accelerate.translate(config)
        if "engine.name" not in found.settings:
            raise ValueError(found.notes[0].why)
        driver = DRIVER.validate_python(_own_fields(found))
        if "driver" in given and DRIVER.validate_python(given["driver"]) != driver:
            raise ValueError("driver and config were both given and differ; give one of them")
        return {**given, "config": config, "driver": driver}


@dataclass(frozen=True)
class Traits:
    """What an engine can do. refuses: run-file field → why this engine cannot have it set."""

    title: str
    spreads: bool  # over processes
    refuses: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)  # precision → why the engine does not have it


_NO_MASTER = dict.fromkeys(
    ("bf16-master", "fp16-master"), "it keeps no second copy of the weights; single, ddp, fsdp and deepspeed do"
)
_ONLY_MASTER = "DeepSpeed keeps master weights in fp32"
_NO_FP8 = {"fp8-mixed": "torchao's layers for it were tried on single, ddp and fsdp alone"}


ENGINES: dict[str, Traits] = {
    "single": Traits("one process, one device", spreads=False),
    "dp": Traits(
        "nn.DataParallel",
        spreads=False,
        refuses={
            "compile": "nn.DataParallel copies the model for every step, and each copy would be compiled again",
            "recompute": "the recomputed forward would run on the original's weights instead of the replica's",
            "offload_activations": "the forward would run on the original's weights instead of the replica's",
        },
        lacks=_NO_MASTER | _NO_FP8,
    ),
    "ddp": Traits("DistributedDataParallel", spreads=True),
    "fsdp": Traits(
        "FSDP2 (fully_shard)", spreads=True, lacks={"fp16-master": "FSDP2 does not scale the loss; take fp16-mixed"}
    ),
    "deepspeed": Traits(
        "DeepSpeed ZeRO",
        spreads=True,
        lacks={"fp16": f"{_ONLY_MASTER}: fp16-master", "bf16": f"{_ONLY_MASTER}: bf16-master"} | _NO_FP8,
    ),
    "accelerate": Traits("Hugging Face Accelerate", spreads=True),
    "mesh": Traits(
        "pipeline, data, context and tensor parallel on one mesh",
        spreads=True,
        refuses={"quantisation_aware": "tensor parallelism cuts rows, and with them the groups that share a scale"},
        lacks=_NO_MASTER | _NO_FP8,
    ),
}

# what a run file or an override may say for a whole block
SHORT: dict[str, dict[str, Any]] = {f"zero{stage}": {"name": "deepspeed", "stage": stage} for stage in range(4)}
SHORT |= {f"accelerate-{name}": {"name": "accelerate", "driver": name} for name in ("ddp", "fsdp", "deepspeed")}
SHORT |= {f"accelerate-zero{s}": {"name": "accelerate", "driver": SHORT[f"zero{s}"]} for s in range(4)}

_KINDS = (SingleEngine, DpEngine, DdpEngine, FsdpEngine, DeepspeedEngine, AccelerateEngine, MeshEngine)

EngineConfig = Annotated[
    Annotated[
        SingleEngine | DpEngine | DdpEngine | FsdpEngine | DeepspeedEngine | AccelerateEngine | MeshEngine,
        Field(discriminator="name"),
    ],
    BeforeValidator(_block),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": [*ENGINES, *SHORT]},
                {"type": "string", "pattern": f"^{LABEL}$"},
                *(kind.model_json_schema() for kind in _KINDS),
            ]
        }
    ),
]


def driving(engine: Any) -> Any:
    """The block that says how the model is spread: accelerate's is its driver."""
    return engine.driver if isinstance(engine, AccelerateEngine) else engine


def label(engine: Any) -> str:
    """An engine's name in rows and reports: ddp, zero2, accelerate-fsdp."""
    own = driving(engine)
    if isinstance(own, MeshEngine):
        return own.label
    name = f"zero{own.stage}" if isinstance(own, DeepspeedEngine) else own.name
    return f"accelerate-{name}" if isinstance(engine, AccelerateEngine) else str(name)


def gives_pieces(engine: Any) -> bool:
    """Whether optimizers get pieces of parameters rather than whole ones."""
    own = driving(engine)
    if isinstance(own, DeepspeedEngine):
        return own.stage > 0
    return isinstance(own, FsdpEngine) or (isinstance(own, MeshEngine) and own.gives_pieces)


def traits(engine: Any) -> Traits:
    return ENGINES[driving(engine).name]
