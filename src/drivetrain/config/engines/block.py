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


class EngineBlock(Frozen):
    """How a run is spread over devices: the block `engine` of a run file.

    A new kind overrides what differs for it and is listed in `drivetrain.config.engines`.
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
        """The block that says how the model is spread: of Accelerate its driver, else this one."""
        return self

    @property
    def gives_pieces(self) -> bool:
        """Whether optimizers get pieces of parameters rather than whole ones."""
        return False

    @property
    def offloads(self) -> bool:
        """Whether anything is kept in CPU memory that a device would hold."""
        return False

    @property
    def packages(self) -> frozenset[str]:
        """The optional packages that it needs; an extra of drivetrain has each one's name."""
        return frozenset()

    def environment(self, device: str, cores: int) -> dict[str, str]:
        """The environment variables that its libraries read. device: "cpu" or "cuda"."""
        del device, cores
        return {}

    # --- how many devices it takes ---------------------------------------------------------------------------------

    def devices(self, processes: int | None, world: int) -> int:
        """Devices of a run with so many processes a node, `world` in all."""
        del processes
        return world

    def data_degree(self, devices: int) -> int:
        """Devices, or groups of them, among which a global batch is dealt."""
        return devices

    def default_processes(self, machine: Machine, nodes: int) -> int:
        """Processes a node where the run file leaves them out: one a GPU."""
        del nodes
        return machine.device_count if machine.device == "cuda" else 1

    @property
    def takes_processes(self) -> bool:
        """Whether `processes` has an effect: of dp, which runs in one process, on its replicas."""
        return True

    @property
    def smallest_world(self) -> int:
        """Ranks that hold one model between them."""
        return 1

    def on(self, world: int) -> Self:
        """The same engine with so many ranks: only the data axis changes."""
        del world
        return self

    @property
    def stages(self) -> int:
        """Pipeline stages: each wants a micro-batch."""
        return 1

    def needs_rows(self, devices: int) -> bool:
        """Whether each sample has to be a row of its own, so that none can be packed."""
        del devices
        return False

    @property
    def single_pass_axis(self) -> str | None:
        """The axis (pp, cp) because of which a step is one forward pass of one model; None where it may be more."""
        return None

    @property
    def takes_encoder_rows(self) -> bool:
        """Whether an encoder may pick the first places of a row's texts between its layers (models/unpadded.py)."""
        return True

    @property
    def splits_the_head(self) -> bool:
        """Whether a rank has logits of a part of the vocabulary alone."""
        return False

    # --- what it cannot do -----------------------------------------------------------------------------------------

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        """Whatever the machine. where: the block's place in the run file, engine or engine.driver."""
        del run, where
        return iter(())

    def problems_here(self, run: RunConfig, machine: Machine, where: str) -> Iterator[Problem]:
        """On this machine, beside packages that are missing."""
        del run, machine, where
        return iter(())

    def adapter_problems(self, adapters: Sequence[Adapter], compiles: bool) -> Iterator[Problem]:
        del adapters, compiles
        return iter(())

    def low_bit_problems(self, kind: OptimizerKind, label: str) -> Iterator[Problem]:
        """Problems of an optimizer whose state is codes and scales. label: the run's engine."""
        del kind, label
        return iter(())

    def notices(self, run: RunConfig, machine: Machine) -> Iterator[str]:
        """Remarks on what works but should be known before the run starts."""
        del run, machine
        return iter(())

    # --- configurations of its own software that it was given --------------------------------------------------------

    def translations(self) -> Iterator[tuple[str, Translation]]:
        """(place below the block, what it says in fields of the run file)."""
        return iter(())
