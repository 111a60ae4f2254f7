"""Joining the process group: as one of several ranks, or as the only one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from drivetrain.launch.variables import ALONE, variables


def join(device: str) -> None:
    """Join the group that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, ...), on this rank's device.

    device: "cpu" or "cuda". Tensors of GPUs travel by NCCL, of CPUs by gloo.
    """
    if device == "cuda":
        mine = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(mine)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=mine)
    else:
        dist.init_process_group("gloo")


@contextmanager
def group_of_one(wanted: bool) -> Iterator[None]:
    """Within, an engine that needs a group finds one, though the run has one process."""
    if not wanted or dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with variables(ALONE):
            yield
    finally:
        dist.destroy_process_group()
