"""Joins the process group: as one of several ranks, or as the only one."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from drivetrain.errors import RunError
from drivetrain.launch.agreement import agree
from drivetrain.launch.variables import ALONE, variables
from drivetrain.measure.gpu_software import device_software
from drivetrain.runtime.hardware import detect, interfaces


def join(device: str, hang_seconds: int | None = None) -> list[str]:
    """Joins the group that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, ...), on this rank's device.

    device: "cpu" or "cuda". Tensors of GPUs travel by NCCL, of CPUs by gloo. hang_seconds: the time after which the
    launcher ends ranks that hang; the group itself has to wait longer. Returns warnings about ranks whose GPUs differ,
    on the first rank; raises UserError if ranks differ in versions that have to match.
    """
    patience = _patience(hang_seconds)
    own = torch.device("cuda", own_gpu()) if device == "cuda" else None
    try:
        if own is not None:
            torch.cuda.set_device(own)
        store, rank, world = next(rendezvous("env://", timeout=patience or default_pg_timeout))
        store.set_timeout(patience or default_pg_timeout)
        warnings = agree(store, rank, world, device_software(detect(device)))
        dist.init_process_group(
            "gloo" if own is None else "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore("ranks", store),
            rank=rank,
            world_size=world,
            timeout=patience,
            device_id=own,
        )
    except (dist.DistError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise RunError(_not_joined(device, error)) from error
    return warnings


def own_gpu() -> int:
    """Returns the index of this rank's GPU among those it sees: its number on this node, or 0 where it sees only one,
    as some schedulers show each process its own. NCCL refuses two ranks on one GPU."""
    return 0 if torch.cuda.device_count() == 1 else int(os.environ["LOCAL_RANK"])


def _patience(hang_seconds: int | None) -> timedelta | None:
    return None if hang_seconds is None else max(timedelta(minutes=30), timedelta(seconds=2 * hang_seconds))


def _not_joined(device: str, error: Exception) -> str:
    """Returns the error, with facts for the search: where the ranks were to meet, and through which interfaces."""
    names = ("GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if device == "cuda" else []))
    asked = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    there = ", ".join(f"{name} ({address})" for name, address in interfaces().items())
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
    return (
        f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} on {socket.gethostname()} could not join the "
        f"others at {where}: {first}. Look whether that name and port can be reached from here, and whether ranks talk "
        f"through the right interface: this machine has {there}; {asked or f'none was chosen: set {names[-1]}'}"
    )


@contextmanager
def group_of_one(wanted: bool) -> Iterator[None]:
    """While the block runs, an engine that needs a group finds one, though the run has one process."""
    if not wanted or dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with variables(ALONE):
            yield
    finally:
        leave()


def leave() -> None:
    """Leaves the process group, and pauses for a tenth of a second so that gloo's threads can finish.

    They free the tensors of the last collective, for which they need Python's lock. A thread that still waits for the
    lock when Python shuts down aborts the whole process ("terminate called without an active exception"), in 7 of 25
    starts of a script that ended right after a collective. Dropping the group joins the threads, but caches of sharded
    parameters can hold it longer than any caller knows.
    """
    dist.destroy_process_group()
    for _ in range(10):
        time.sleep(0.01)  # gives the lock away each time
