"""The engines of plain PyTorch: one device, replicas in one process, copies in several, shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from drivetrain.config.base import doc
from drivetrain.config.engines.block import NO_FP8, NO_MASTER, EngineBlock, Shares, Traits
from drivetrain.config.machine import Machine
from drivetrain.config.optimizers import OptimizerKind
from drivetrain.errors import Problem

if TYPE_CHECKING:
    from drivetrain.config.run import RunConfig


class SingleEngine(EngineBlock):
    TRAITS: ClassVar[Traits] = Traits(
        "one process, one device", "single:SingleEngine", spreads=False, gains_by_compiling=True
    )
    name: Literal["single"] = doc("One process on one device", "single")

    @property
    def takes_processes(self) -> bool:
        return False


class DpEngine(EngineBlock):
    TRAITS: ClassVar[Traits] = Traits(
        "nn.DataParallel",
        "dp:DpEngine",
        spreads=False,
        refuses={
            "compile": "nn.DataParallel copies the model for every step, and each copy would be compiled again",
            "recompute": "the recomputed forward would run on the original's weights instead of the replica's",
            "offload_activations": "the forward would run on the original's weights instead of the replica's",
        },
        lacks=NO_MASTER | NO_FP8,
    )
    name: Literal["dp"] = doc("nn.DataParallel: one process, a replica on each of its GPUs", "dp")
    replicas: int | None = doc("Replicas of the model; left out, one for each of processes", None, gt=0)

    def devices(self, processes: int | None, world: int) -> int:
        del world
        return self.replicas or processes or 1

    def is_emulated(self, device: str) -> bool:
        return device == "cpu"

    def needs_rows(self, devices: int) -> bool:
        return devices > 1  # rows are dealt to the replicas

    def notices(self, run: RunConfig, machine: Machine) -> Iterator[str]:
        del run
        if self.is_emulated(machine.device):
            yield "engine=dp on a CPU runs its replicas on threads (dp, CPU emulation): semantics, not speed"


class DdpEngine(EngineBlock):
    TRAITS: ClassVar[Traits] = Traits("DistributedDataParallel", "ddp:DdpEngine", gains_by_compiling=True)
    name: Literal["ddp"] = doc("DistributedDataParallel: a process and a copy of the model for each device", "ddp")
    shard_optimizer: bool = doc("ZeRO-1: each rank keeps its share of the optimizer's state", False)
    gradient_compression: Literal["none", "fp16", "bf16"] = doc("Dtype gradients are exchanged in", "none")
    bucket_mb: float = doc("MiB of gradients exchanged at once", 25.0, gt=0)
    static_graph: bool = doc("The model does the same in every step (quicker with recompute)", False)
    find_unused: bool = doc("Some parameters get no gradient in some steps", False)

    def shares(self, devices: int) -> Shares:
        return Shares(optimizer=1 / devices, gathers=1.0) if self.shard_optimizer else Shares()

    def problems_here(self, run: RunConfig, machine: Machine, where: str) -> Iterator[Problem]:
        del run
        if self.gradient_compression == "bf16" and machine.device == "cpu":
            why = "DDP compresses to bf16 between GPUs only"
            yield Problem(f"{where}.gradient_compression", why, "give fp16 or none")


class FsdpEngine(EngineBlock):
    TRAITS: ClassVar[Traits] = Traits(
        "FSDP2 (fully_shard)",
        "fsdp:FsdpEngine",
        lacks={"fp16-master": "FSDP2 does not scale the loss; take fp16-mixed"},
        gains_by_compiling=True,
    )
    name: Literal["fsdp"] = doc("FSDP2 (fully_shard): parameters, gradients and optimizer state sharded", "fsdp")
    reshard: bool = doc("Free gathered parameters after forward (ZeRO-3); false keeps them to backward (ZeRO-2)", True)
    hybrid: int | None = doc("Shard over so many ranks and replicate over the others (HSDP)", None, gt=1)
    offload: bool = doc("Keep parameters, gradients and optimizer state in CPU memory", False)
    wrap: Literal["block", "size"] | list[str] = doc(
        "The unit that is gathered at once: block (repeated modules), size, or module classes, e.g. [Linear, Conv2d]",
        "block",
    )
    wrap_min_parameters: int = doc(
        "wrap=size: parameters from which on a module is gathered by itself", 1_000_000, gt=0
    )
    meta: bool = doc("Build the model on the first rank only; the others get their shards from it", False)

    @property
    def gives_pieces(self) -> bool:
        return True

    @property
    def offloads(self) -> bool:
        return self.offload

    def whole_copies(self, ranks: int) -> int:
        return 1 if self.meta else ranks

    def shares(self, devices: int) -> Shares:
        if self.offload:
            return Shares(0.0, 0.0, 0.0, gathers=1.0)
        share = 1 / (self.hybrid or devices)
        return Shares(share, share, share, gathers=2.0 if self.reshard else 1.0)

    @property
    def whole_on_device(self) -> bool:
        return False

    @property
    def smallest_world(self) -> int:
        return self.hybrid or 1

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        if self.hybrid and run.world_size % self.hybrid:
            why = f"the world size ({run.world_size}) is no multiple of the shards ({self.hybrid})"
            yield Problem(f"{where}.hybrid", why, "give a divisor of processes * nodes")

    def low_bit_problems(self, kind: OptimizerKind, label: str) -> Iterator[Problem]:
        if kind.package == "bitsandbytes":
            why = f"{kind.name} of bitsandbytes updates whole tensors, and engine={label} shards them"
            yield Problem("optimizer.name", why, "give adamw8bit (torchao), or take engine=ddp")
