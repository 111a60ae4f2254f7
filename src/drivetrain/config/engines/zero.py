"""DeepSpeed's ZeRO as an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, WithJsonSchema, model_validator

from drivetrain.config import deepspeed
from drivetrain.config.base import doc
from drivetrain.config.engines.block import NO_FP8, EngineBlock, Shares, Traits
from drivetrain.config.files import read_json
from drivetrain.config.machine import Machine
from drivetrain.config.optimizers import OptimizerKind
from drivetrain.config.translation import Translation
from drivetrain.errors import Problem, UserError

if TYPE_CHECKING:
    from drivetrain.config.run import RunConfig

Place = Literal["none", "cpu", "nvme"]
FILE_OR_CONTENT = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]})
_ONLY_MASTER = "DeepSpeed keeps master weights in fp32"


def _read_file(reader: Callable[[Path], dict[str, Any]], given: Any) -> Any:
    """Replaces a path by the content of its file, so that a run keeps what it was started with."""
    try:
        return reader(Path(given)) if isinstance(given, str | Path) else given
    except UserError as error:
        raise ValueError(f"{error.problems[0].why}; {error.problems[0].fix}") from None


def read(reader: Callable[[Path], dict[str, Any]]) -> BeforeValidator:
    return BeforeValidator(lambda given: _read_file(reader, given))


def content(given: Any, reader: Callable[[Path], dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the content of a block's `config`. Raises ValueError if its file cannot be read."""
    config = given.get("config") if isinstance(given, dict) else None
    return _read_file(reader, config) if isinstance(config, str | Path | dict) else None


def own_fields(found: Translation) -> dict[str, Any]:
    """Returns the engine's fields among those of a translation."""
    return {key.removeprefix("engine."): v for key, v in found.settings.items() if key.startswith("engine.")}


class DeepspeedEngine(EngineBlock):
    TRAITS: ClassVar[Traits] = Traits(
        "DeepSpeed ZeRO",
        "deepspeed.engine:DeepspeedEngine",
        lacks={"fp16": f"{_ONLY_MASTER}: fp16-master", "bf16": f"{_ONLY_MASTER}: bf16-master"} | NO_FP8,
    )
    name: Literal["deepspeed"] = doc("DeepSpeed's ZeRO: state sharded over the ranks, by stage", "deepspeed")
    stage: Literal[0, 1, 2, 3] = doc(
        "1 shards the optimizer's state, 2 gradients too, 3 parameters too, 0 nothing; left out, config's", 2
    )
    offload_optimizer: Place = doc("Where the optimizer's state is kept: none (on the device), cpu or nvme", "none")
    offload_parameters: Place = doc("Stage 3: where parameters are kept: none (on the device), cpu or nvme", "none")
    nvme_path: Path | None = doc("Folder on the disk that nvme means", None)
    config: Annotated[dict[str, Any] | None, read(read_json), FILE_OR_CONTENT] = doc(
        "DeepSpeed's own JSON, a path or its content; `auto` is filled in from the run file", None
    )

    @model_validator(mode="before")
    @classmethod
    def _as_the_config_says(cls, given: Any) -> Any:
        config = content(given, read_json)
        if config is None:
            return given
        return {**own_fields(deepspeed.translate(config)), **given, "config": config}

    @property
    def label(self) -> str:
        return f"zero{self.stage}"

    @property
    def gives_pieces(self) -> bool:
        return self.stage > 0

    @property
    def offloads(self) -> bool:
        return "cpu" in (self.offload_optimizer, self.offload_parameters)

    @property
    def keeps_elsewhere(self) -> bool:
        return {self.offload_optimizer, self.offload_parameters} != {"none"}

    @property
    def keeps_on_disk(self) -> bool:
        return "nvme" in (self.offload_optimizer, self.offload_parameters)

    def without_disk(self) -> Self:
        places = {name: getattr(self, name) for name in ("offload_optimizer", "offload_parameters")}
        return self.model_copy(update={name: "cpu" for name, place in places.items() if place == "nvme"})

    def shares(self, devices: int) -> Shares:
        moved, share = self.offload_optimizer != "none", 1 / devices
        return Shares(
            parameters=0.0 if self.offload_parameters != "none" else share if self.stage == 3 else 1.0,
            gradients=0.0 if moved else share if self.stage >= 2 else 1.0,
            optimizer=0.0 if moved else share if self.stage >= 1 else 1.0,
            gathers=(0.0, 1.0, 1.0, 2.0)[self.stage],
        )

    @property
    def packages(self) -> frozenset[str]:
        return frozenset({"deepspeed"})

    def environment(self, device: str, cores: int) -> dict[str, str]:
        del cores
        return {"DS_ACCELERATOR": "cpu"} if device == "cpu" else {}

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from self._offload_problems(where)
        if self.offload_parameters == "nvme" and not run.precision_spec.cast:
            why = f"DeepSpeed rounds parameters on a disk to 16 bits, which {run.precision} does not mean"
            yield Problem(f"{where}.offload_parameters", why, "give cpu, or precision=bf16-master")
        if self.stage == 0 and run.precision_spec.cast:
            why = f"at stage 0 DeepSpeed accumulates and sums gradients in 16 bits, which {run.precision} does in fp32"
            yield Problem("precision", why, "give stage=1 or more, or bf16-mixed")
        if self.stage > 0 and run.numerics.skips_spikes:
            why = (
                "DeepSpeed measures the norm and updates in one call: it skips a step that is not "
                "finite, and no other step can be skipped"
            )
            yield Problem("numerics.skip", why, "give numerics.skip=true, or take engine=fsdp or ddp")

    def _offload_problems(self, where: str) -> Iterator[Problem]:
        places = {"offload_optimizer": (self.offload_optimizer, 1), "offload_parameters": (self.offload_parameters, 3)}
        for field, (place, least) in places.items():
            if place != "none" and self.stage < least:
                why = f"{place} was given, but stage {self.stage} shards nothing of it"
                yield Problem(f"{where}.{field}", why, f"give stage={least} or more, or leave it out")
            if place == "nvme" and self.nvme_path is None:
                yield Problem(f"{where}.nvme_path", f"is required with {field}=nvme", "give a folder on that disk")
            if place == "nvme" and self.stage < 3:
                why = f"DeepSpeed uses the disk at stage 3 only, not {self.stage}"
                yield Problem(f"{where}.{field}", why, "give cpu")

    def problems_here(self, run: RunConfig, machine: Machine, where: str) -> Iterator[Problem]:
        del where
        if run.precision_spec.cast and run.precision_spec.scaled and machine.device == "cpu":
            yield Problem("precision", "DeepSpeed has no fp16 on a CPU", "take bf16-master, or engine=single or ddp")

    def low_bit_problems(self, kind: OptimizerKind, label: str) -> Iterator[Problem]:
        if self.stage > 0:
            why = f"{kind.name} keeps its state in blocks, and engine={label} updates flat pieces of many parameters"
            fix = "take engine=fsdp or ddp, or adamw"
            yield Problem("optimizer.name", f"{why}: no checkpoint could name them", fix)

    def translations(self) -> Iterator[tuple[str, Translation]]:
        if self.config is not None:
            yield "config", deepspeed.translate(self.config)
