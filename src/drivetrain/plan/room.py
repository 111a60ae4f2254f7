"""The memory that a rank may take, and the part of it that no trace sees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from drivetrain.config.engines import EngineBlock
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.plan.calibration import DeviceSpeeds
from drivetrain.plan.step_costs import Operations, StepCosts

# what no trace sees on one rank that was not calibrated, in bytes: at least, at most. CUDA: context, NCCL's buffers,
# cuBLAS' and cuDNN's workspaces, as measured from 0.5 to 1.6 GB. CPU: the libraries that a rank imports, 0.5 GB with
# PyTorch alone and 0.9 with Transformers and DeepSpeed
UNSEEN = {"cuda": (500_000_000, 1_600_000_000), "cpu": (500_000_000, 900_000_000)}
# what the allocator holds for each byte of tensors that are alive at the peak, gaps between them included. CPU: fitted
# to resident memory in bench/results/planned.md. CUDA: the most that was measured on one H200 (planned-gpu.md), 1.02
# where every rank has whole tensors, and 1.14 under FSDP, whose gathered blocks leave gaps. ZeRO and meshes were not
# measured, and get FSDP's
HELD_ON_CPU = 1.6
HELD_ON_GPU, HELD_ON_GPU_OF_PIECES = 1.02, 1.14


def room_of_a_rank(run: RunConfig, machine: Machine) -> int:
    """Returns the bytes that a rank may take: a device's, of a CPU host the rank's share, or the run's own limit."""
    shares = 1 if machine.device == "cuda" else run.world_size // run.nodes
    room = machine.memory_bytes // shares
    return room if run.memory_limit_bytes is None else min(room, run.memory_limit_bytes)


def with_held(costs: StepCosts, run: RunConfig, machine: Machine) -> StepCosts:
    """Returns the costs with what the allocator holds for their tensors as reserved memory."""
    held = held_by(run.engine, machine)

    def of(costs: StepCosts) -> StepCosts:
        return replace(costs, memory=replace(costs.memory, reserved=round(held * costs.memory.allocated)))

    return replace(of(costs), by_rank={rank: of(each) for rank, each in costs.by_rank.items()})


def held_by(engine: EngineBlock, machine: Machine) -> float:
    """Returns the bytes that the allocator holds for each byte of tensors, at the peak."""
    on_gpu = HELD_ON_GPU_OF_PIECES if engine.gives_pieces else HELD_ON_GPU
    return HELD_ON_CPU if machine.device == "cpu" else on_gpu


def unseen_bytes(machine: Machine, speeds: DeviceSpeeds | None) -> tuple[int, int]:
    """Returns the least and the most bytes that a rank takes beside its tensors. speeds: of a calibrated machine."""
    libraries = {} if speeds is None else speeds.libraries
    if "imports" not in libraries:
        return UNSEEN[machine.device]
    return libraries["imports"], sum(libraries.values())


def library_bytes(operations: Iterable[Operations], speeds: DeviceSpeeds) -> int:
    """Returns what libraries take on a calibrated CPU beyond their import, once these operations were computed."""
    kinds = {"step", *(each.kind for each in operations)}
    return sum(size for kind, size in speeds.libraries.items() if kind in kinds)
