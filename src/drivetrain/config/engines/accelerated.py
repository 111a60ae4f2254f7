"""Hugging Face Accelerate as an engine: one of its drivers wraps the model, and the driver's block answers for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator

from drivetrain.config import accelerate
from drivetrain.config.base import JsonSchemaMadeLate, doc
from drivetrain.config.engines.block import EngineBlock, Shares, Traits
from drivetrain.config.engines.plain import DdpEngine, FsdpEngine
from drivetrain.config.engines.zero import FILE_OR_CONTENT, DeepspeedEngine, content, own_fields, read
from drivetrain.config.files import read_yaml
from drivetrain.config.machine import Machine
from drivetrain.config.optimizers import OptimizerKind
from drivetrain.config.translation import Translation
from drivetrain.errors import Problem

if TYPE_CHECKING:
    from drivetrain.config.adapter import Adapter
    from drivetrain.config.run import RunConfig

ZERO: dict[str, dict[str, Any]] = {f"zero{stage}": {"name": "deepspeed", "stage": stage} for stage in range(4)}


def _block(given: Any) -> Any:
    return ZERO.get(given, {"name": given}) if isinstance(given, str) else given


_DRIVERS = (DdpEngine, FsdpEngine, DeepspeedEngine)
Driver = Annotated[
    Annotated[DdpEngine | FsdpEngine | DeepspeedEngine, Field(discriminator="name")],
    BeforeValidator(_block),
    JsonSchemaMadeLate(lambda: {"anyOf": [{"type": "string"}, *(kind.model_json_schema() for kind in _DRIVERS)]}),
]
DRIVER: TypeAdapter[DdpEngine | FsdpEngine | DeepspeedEngine] = TypeAdapter(Driver)


def _with_folder(path: Path) -> dict[str, Any]:
    return accelerate.whole(read_yaml(path), path.parent)


class AccelerateEngine(EngineBlock):
    TRAITS: ClassVar[Traits] = Traits("Hugging Face Accelerate", "accelerate:Accelerate")
    name: Literal["accelerate"] = doc("Hugging Face Accelerate wraps the model, by one of its drivers", "accelerate")
    driver: Driver = doc("ddp, fsdp or deepspeed, with that engine's options", DdpEngine())
    config: Annotated[dict[str, Any] | None, read(_with_folder), FILE_OR_CONTENT] = doc(
        "A YAML of `accelerate config`, a path or its content, which names the driver", None
    )

    @model_validator(mode="before")
    @classmethod
    def _driver_of_the_config(cls, given: Any) -> Any:
        config = content(given, _with_folder)
        if config is None:
            return given
        found = accelerate.translate(config)
        if "engine.name" not in found.settings:
            raise ValueError(found.notes[0].why)
        driver = DRIVER.validate_python(own_fields(found))
        if "driver" in given and DRIVER.validate_python(given["driver"]) != driver:
            raise ValueError("driver and config were both given and differ; give one of them")
        return {**given, "config": config, "driver": driver}

    @property
    def traits(self) -> Traits:
        implementation = f"{self.TRAITS.implementation}{self.driver.name.capitalize()}"
        return replace(self.driver.traits, implementation=implementation, gains_by_compiling=False)  # not tried

    @property
    def label(self) -> str:
        return f"accelerate-{self.driver.label}"

    @property
    def driving(self) -> EngineBlock:
        return self.driver

    @property
    def gives_pieces(self) -> bool:
        return self.driver.gives_pieces

    @property
    def offloads(self) -> bool:
        return self.driver.offloads

    @property
    def keeps_elsewhere(self) -> bool:
        return self.driver.keeps_elsewhere

    @property
    def keeps_on_disk(self) -> bool:
        return self.driver.keeps_on_disk

    @property
    def packages(self) -> frozenset[str]:
        return self.driver.packages | {"accelerate"}

    def environment(self, device: str, cores: int) -> dict[str, str]:
        threads = {"OMP_NUM_THREADS": str(cores)}  # Accelerate would set their number itself, and warn
        return self.driver.environment(device, cores) | threads

    def whole_copies(self, ranks: int) -> int:
        return self.driver.whole_copies(ranks)

    def shares(self, devices: int) -> Shares:
        return self.driver.shares(devices)

    @property
    def whole_on_device(self) -> bool:
        return self.driver.whole_on_device

    @property
    def smallest_world(self) -> int:
        return self.driver.smallest_world

    def on(self, world: int) -> Self:
        return self.model_copy(update={"driver": self.driver.on(world)})

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from self.driver.problems(run, f"{where}.driver")
        if isinstance(self.driver, DdpEngine) and self.driver.shard_optimizer:
            yield Problem(
                f"{where}.driver.shard_optimizer", "Accelerate has no counterpart", "take engine=ddp, or zero1"
            )
        if isinstance(self.driver, FsdpEngine) and self.driver.meta:
            yield Problem(f"{where}.driver.meta", "Accelerate does it for from_pretrained only", "take engine=fsdp")

    def problems_here(self, run: RunConfig, machine: Machine, where: str) -> Iterator[Problem]:
        return self.driver.problems_here(run, machine, f"{where}.driver")

    def adapter_problems(self, adapters: Sequence[Adapter], compiles: bool) -> Iterator[Problem]:
        return self.driver.adapter_problems(adapters, compiles)

    def low_bit_problems(self, kind: OptimizerKind, label: str) -> Iterator[Problem]:
        return self.driver.low_bit_problems(kind, label)

    def notices(self, run: RunConfig, machine: Machine) -> Iterator[str]:
        yield from self.driver.notices(run, machine)
        name = self.driver.name
        if name != "ddp" and machine.device == "cpu":
            yield f"Accelerate has no {name} between CPUs: it is made to take them for GPUs, and the result is checked"

    def translations(self) -> Iterator[tuple[str, Translation]]:
        if self.config is not None:
            yield "config", accelerate.translate(self.config)
        else:
            yield from ((f"driver.{place}", found) for place, found in self.driver.translations())
