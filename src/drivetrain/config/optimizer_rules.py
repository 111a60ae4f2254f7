"""What an optimizer cannot do: with pieces of parameters that an engine gives it, and on a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drivetrain.config.engine import DeepspeedEngine, FsdpEngine, driving, gives_pieces, label
from drivetrain.config.machine import Machine
from drivetrain.config.mesh import MeshEngine
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem

# whose update of a number depends on others of its tensor: rows and columns, norms, orthogonal factors
WHOLE_TENSORS = {
    *("adafactor", "adamini", "came", "galore", "galoreadamw", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap"),
}
FP8_FROM = (8, 9)  # compute capability: what compiles torchao's update has no fp8 below (its README)


def optimizer_problems(run: RunConfig) -> Iterator[Problem]:
    """Whatever the machine."""
    engine, optimizer = driving(run.engine), run.optimizer
    name = optimizer.name.replace(":", ".").rpartition(".")[2]
    if gives_pieces(engine) and name.lower() in WHOLE_TENSORS:
        why = f"{name} needs whole tensors, and engine={label(run.engine)} gives each rank pieces of them"
        yield Problem("optimizer.name", why, "take engine=ddp, or adamw")
    elif optimizer.low_bit:
        yield from _low_bit(run, engine)


def _low_bit(run: RunConfig, engine: Any) -> Iterator[Problem]:
    name = run.optimizer.name
    if isinstance(engine, MeshEngine):
        why = f"{name} keeps its state in blocks, which are not joined over a mesh yet"
        yield Problem("optimizer.name", why, "take adamw, or engine=fsdp")
    elif isinstance(engine, DeepspeedEngine) and engine.stage > 0:
        why = f"{name} keeps its state in blocks, and engine={label(run.engine)} updates flat pieces of many parameters"
        yield Problem("optimizer.name", f"{why}: no checkpoint could name them", "take engine=fsdp or ddp, or adamw")
    elif isinstance(engine, FsdpEngine) and "bitsandbytes" in run.optimizer.path:
        why = f"{name} of bitsandbytes updates whole tensors, and engine={label(run.engine)} shards them"
        yield Problem("optimizer.name", why, "give adamw8bit (torchao), or take engine=ddp")


def optimizer_problems_here(run: RunConfig, machine: Machine) -> Iterator[Problem]:
    """On this machine."""
    name, path = run.optimizer.name, run.optimizer.path
    if "Paged" in path and machine.device != "cuda":
        why = f"{name} moves its state between a GPU and main memory, and this is {machine.device_name}"
        yield Problem("optimizer.name", why, "give bnb-adamw8bit or adamw8bit")
    capability = machine.compute_capability
    if "Fp8" in path and capability is not None and capability < FP8_FROM:
        has, asks = (".".join(map(str, version)) for version in (capability, FP8_FROM))
        why = f"{name} needs compute capability {asks}, and {machine.device_name} has {has}"
        yield Problem("optimizer.name", why, "give adamw8bit")
