"""The base of all engines' blocks: its methods answer for the engine, so that no other code asks which kind it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from drivetrain.config.base import Frozen
from drivetrain.config.machine import Machine
from drivetrain.config.optimizers import OptimizerKind
from drivetrain.config.translation import Translation
from drivetrain.errors import Problem

if TYPE_CHECKING:
    from drivetrain.config.adapter import Adapter
    from drivetrain.config.run import RunConfig

# reasons that several engines share
NO_MASTER = dict.fromkeys(
    ("bf16-master", "fp16-master"), "it keeps no second copy of the weights; single, ddp, fsdp and deepspeed do"
)
NO_FP8 = {"fp8-mixed": "torchao's layers for it were tried on single, ddp and fsdp alone"}


@dataclass(frozen=True)
class Traits:
    """The abilities of a kind of engine, whatever its options."""

    title: str
    implementation: str  # the class in drivetrain.engines, as module:class
    spreads: bool = True  # over processes
    refuses: Mapping[str, str] = field(default_factory=dict)  # field of the run file → why it cannot be set
    lacks: Mapping[str, str] = field(default_factory=dict)  # precision → why the engine does not have it
    gains_by_compiling: bool = False  # as far as is known


@dataclass(frozen=True)
class Shares:
    """The shares of a model that one device holds, at the least: of its parameters, their gradients and the optimizer's
    state. gathers: how often all parameters come over the network in a step, at the least."""

    parameters: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0
    gathers: float = 0.0


class EngineBlock(Frozen):
    """How a run is spread over devices: the block `engine` of a run file.

    A new kind is a class with TRAITS in a file of this folder, and overrides what differs for it.
    """

    TRAITS: ClassVar[Traits]
    name: str

    # --- what it is ------------------------------------------------------------------------------------------------

    @property
    def traits(self) -> Traits:
        return self.TRAITS

    @property
    def label(self) -> str:
        """The name in rows and reports: ddp, zero2, accelerate-fsdp."""
        return self.name

    @property
    def driving(self) -> EngineBlock:
        """The block that states how the model is spread: Accelerate's driver, for other engines the block itself."""
        return self

    @property
    def gives_pieces(self) -> bool:
        """Whether ranks hold shards of parameters, so that optimizers get no whole ones."""
        return False

    @property
    def offloads(self) -> bool:
        """Whether CPU memory holds tensors that would otherwise be on a device."""
        return False

    @property
    def keeps_elsewhere(self) -> bool:
        """Whether CPU memory or a disk holds tensors that would otherwise be on a device."""
        return self.offloads

    @property
    def keeps_on_disk(self) -> bool:
        """Whether a disk holds some of these tensors."""
        return False

    def without_disk(self) -> Self:
        """Returns the same engine with CPU memory in place of the disk."""
        return self

    @property
    def packages(self) -> frozenset[str]:
        """The optional packages that the engine needs; each is the name of one of drivetrain's extras as well."""
        return frozenset()

    def environment(self, device: str, cores: int) -> dict[str, str]:
        """Returns the environment variables that the engine's libraries read. device: "cpu" or "cuda"."""
        del device, cores
        return {}

    # --- how many devices it takes ---------------------------------------------------------------------------------

    def devices(self, processes: int | None, world: int) -> int:
        """Returns the number of devices of a run with `processes` processes a node and `world` processes in all."""
        del processes
        return world

    def data_degree(self, devices: int) -> int:
        """Returns the number of devices, or groups of devices, that each global batch is divided among."""
        return devices

    def default_processes(self, machine: Machine, nodes: int) -> int:
        """Returns the processes a node where the run file states none: one a GPU."""
        del nodes
        return machine.device_count if machine.device == "cuda" else 1

    @property
    def takes_processes(self) -> bool:
        """Whether `processes` has an effect. dp runs in one process, on several replicas."""
        return True

    def whole_copies(self, ranks: int) -> int:
        """Returns how many of the `ranks` of one machine build the whole model in CPU memory."""
        return ranks

    def shares(self, devices: int) -> Shares:
        """Returns what each of the run's devices holds."""
        del devices
        return Shares()

    @property
    def whole_on_device(self) -> bool:
        """Whether a device holds all weights at some time, be it only until they are sharded."""
        return True

    @property
    def smallest_world(self) -> int:
        """Returns the number of ranks that hold one model between them."""
        return 1

    def on(self, world: int) -> Self:
        """Returns the same engine for `world` ranks: only the data axis changes."""
        del world
        return self

    def is_emulated(self, device: str) -> bool:
        """Returns whether it is played on such a device ("cpu", "cuda"), so that its speed there means nothing."""
        del device
        return False

    @property
    def axes(self) -> Mapping[str, int]:
        """Returns the axes besides the data's along which one sample's work is divided, with their ranks."""
        return {}

    @property
    def stages(self) -> int:
        """The number of pipeline stages; each needs a micro-batch."""
        return 1

    def needs_rows(self, devices: int) -> bool:
        """Returns whether each sample must be a row of its own, so that samples cannot be packed."""
        del devices
        return False

    @property
    def single_pass_axis(self) -> str | None:
        """The axis (pp, cp) because of which a step is one forward pass of one model; None if a step may have
        several."""
        return None

    @property
    def takes_encoder_rows(self) -> bool:
        """Whether an encoder may pick the first positions of a row's texts between its layers (models/unpadded.py)."""
        return True

    @property
    def splits_the_head(self) -> bool:
        """Whether a rank has the logits of only a part of the vocabulary."""
        return False

    # --- what it cannot do -----------------------------------------------------------------------------------------

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        """Returns the problems that hold on every machine. where: the block's place in the run file, engine or
        engine.driver."""
        del run, where
        return iter(())

    def problems_here(self, run: RunConfig, machine: Machine, where: str) -> Iterator[Problem]:
        """Returns the problems that this machine adds, beside missing packages."""
        del run, machine, where
        return iter(())

    def adapter_problems(self, adapters: Sequence[Adapter], compiles: bool) -> Iterator[Problem]:
        del adapters, compiles
        return iter(())

    def low_bit_problems(self, kind: OptimizerKind, label: str) -> Iterator[Problem]:
        """Returns the problems of an optimizer whose state is codes and scales. label: the run's engine."""
        del kind, label
        return iter(())

    def notices(self, run: RunConfig, machine: Machine) -> Iterator[str]:
        """Returns remarks on settings that work but should be known before the run starts."""
        del run, machine
        return iter(())

    # --- configurations of its own software that it was given --------------------------------------------------------

    def translations(self) -> Iterator[tuple[str, Translation]]:
        """Returns (place below the block, translation into fields of the run file) for each foreign configuration."""
        return iter(())
