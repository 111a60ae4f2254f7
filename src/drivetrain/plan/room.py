"""The memory that a rank may take, and the part of it that no trace sees."""

from __future__ import annotations

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig

# what no trace sees on one rank, in bytes: at least, at most. CUDA: context, NCCL's buffers, cuBLAS' and cuDNN's
# workspaces, as measured from 0.5 to 1.6 GB. CPU: the libraries that a rank imports, 0.5 GB with PyTorch alone and 0.9
# with Transformers and DeepSpeed
UNSEEN = {"cuda": (500_000_000, 1_600_000_000), "cpu": (500_000_000, 900_000_000)}


def room_of_a_rank(run: RunConfig, machine: Machine) -> int:
    """Returns the bytes that a rank may take: a device's, of a CPU host the rank's share, or the run's own limit."""
    shares = 1 if machine.device == "cuda" else run.world_size // run.nodes
    room = machine.memory_bytes // shares
    return room if run.memory_limit_bytes is None else min(room, run.memory_limit_bytes)
