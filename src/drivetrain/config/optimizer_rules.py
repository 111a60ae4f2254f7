"""Problems of an optimizer: with an engine that shards parameters, and with a device."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.config.machine import Machine
from drivetrain.config.precision import FP8_FROM
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem

# whose update of a number depends on others of its tensor: rows and columns, norms, orthogonal factors
WHOLE_TENSORS = {
    *("adafactor", "adamini", "came", "galore", "galoreadamw", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap"),
}


def optimizer_problems(run: RunConfig) -> Iterator[Problem]:
    """Returns the problems that hold on every machine."""
    engine, optimizer = run.engine, run.optimizer
    name = optimizer.name.replace(":", ".").rpartition(".")[2]
    if engine.gives_pieces and name.lower() in WHOLE_TENSORS:
        why = f"{name} needs whole tensors, and engine={engine.label} gives each rank pieces of them"
        yield Problem("optimizer.name", why, "take engine=ddp, or adamw")
    elif optimizer.low_bit:
        yield from engine.low_bit_problems(optimizer.name, optimizer.path, engine.label)


def optimizer_problems_here(run: RunConfig, machine: Machine) -> Iterator[Problem]:
    """Returns the problems that this machine adds."""
    name, path = run.optimizer.name, run.optimizer.path
    if "Paged" in path and machine.device != "cuda":
        why = f"{name} moves its state between a GPU and main memory, and this is {machine.device_name}"
        yield Problem("optimizer.name", why, "give bnb-adamw8bit or adamw8bit")
    capability = machine.compute_capability
    if "Fp8" in path and capability is not None and capability < FP8_FROM:
        has, asks = (".".join(map(str, version)) for version in (capability, FP8_FROM))
        why = f"{name} needs compute capability {asks}, and {machine.device_name} has {has}"
        yield Problem("optimizer.name", why, "give adamw8bit")
