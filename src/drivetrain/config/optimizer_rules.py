"""Problems of an optimizer: with an engine that shards parameters, and with a device."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem


def optimizer_problems(run: RunConfig) -> Iterator[Problem]:
    """Yields the problems that hold on every machine."""
    engine, kind = run.engine, run.optimizer.kind
    if engine.gives_pieces and kind.whole_tensors:
        name = kind.name.replace(":", ".").rpartition(".")[2]
        why = f"{name} needs whole tensors, and engine={engine.label} gives each rank pieces of them"
        yield Problem("optimizer.name", why, "take engine=ddp, or adamw")
    elif kind.low_bit:
        yield from engine.low_bit_problems(kind, engine.label)


def optimizer_problems_here(run: RunConfig, machine: Machine) -> Iterator[Problem]:
    """Yields the problems that this machine adds."""
    kind, capability = run.optimizer.kind, machine.compute_capability
    if kind.needs_gpu and machine.device != "cuda":
        why = f"{kind.name} moves its state between a GPU and main memory, and this is {machine.device_name}"
        yield Problem("optimizer.name", why, "give bnb-adamw8bit or adamw8bit")
    if capability is not None and capability < kind.compute_capability:
        has, asks = (".".join(map(str, version)) for version in (capability, kind.compute_capability))
        why = f"{kind.name} needs compute capability {asks}, and {machine.device_name} has {has}"
        yield Problem("optimizer.name", why, "give adamw8bit")
