"""Processes that form a gloo group, as the ranks of a run do, and do one thing after another for the tests.

A test session starts as many as it needs once. After a failure they start anew.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess, SpawnProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.memory.garbage import own_process, set_imports_apart
from tests.device import chosen_device

Child = ForkServerProcess | SpawnProcess
SECONDS = 900  # a rank that hangs is a failure, not a test that never ends


# children are forked off a server that has imported what most of them need, and computed nothing: no thread lives there
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["tests.parity.mesh_promises", "drivetrain.training.run", "drivetrain.workloads.image_classification"]
)
SPAWNS = multiprocessing.get_context("spawn")  # CUDA cannot be used in a fork


def start(target: Callable[..., None], *args: Any, daemon: bool = False) -> Child:
    """Starts a child in tenths of a second; the first one in eight, with the server."""
    on_cpu = chosen_device() == "cpu"
    process: Child = (FORKS if on_cpu else SPAWNS).Process(target=target, args=args, daemon=daemon)
    with pytest.MonkeyPatch.context() as patched:  # DeepSpeed looks for it when it is imported
        if on_cpu:
            patched.setenv("DS_ACCELERATOR", "cpu")
        process.start()
    return process


class RankPool:
    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Child] = []
        self._ends: list[Connection] = []

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """work(*args) on each rank (of a module that can be imported); the results by rank.

        RuntimeError with a rank's traceback.
        """
        if not self._processes:
            self._start()
        try:
            for end in self._ends:
                end.send((work, args))
            return self._received()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._ends = [], []

    def _start(self) -> None:
        folder = tempfile.mkdtemp(prefix="ranks-")
        for rank in range(self.world):
            here, there = FORKS.Pipe()
            process = start(_rank, rank, self.world, folder, there, daemon=True)
            there.close()
            self._processes.append(process)
            self._ends.append(here)

    def _received(self) -> list[Any]:
        rank_of = {end: rank for rank, end in enumerate(self._ends)}
        results: dict[int, Any] = {}
        while len(results) < self.world:
            waiting = [end for end in self._ends if rank_of[end] not in results]
            ready = wait(waiting, timeout=SECONDS)
            if not ready:
                raise RuntimeError(f"ranks {[rank_of[end] for end in waiting]} gave no result in {SECONDS} s")
            for end in ready:
                assert isinstance(end, Connection)
                try:
                    result, failure = end.recv()
                except EOFError:
                    raise RuntimeError(f"rank {rank_of[end]} ended without a word") from None
                if failure is not None:
                    raise RuntimeError(f"rank {rank_of[end]}:\n{failure}")
                results[rank_of[end]] = result
        return [results[rank] for rank in range(self.world)]


def _rank(rank: int, world: int, folder: str, end: Connection) -> None:
    own_process()
    gc.freeze()  # what the server imported: passes over it would also copy the memory that is shared with it
    counts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
    own = {"DS_ACCELERATOR": "cpu"} if chosen_device() == "cpu" else {}
    os.environ.update({name: str(value) for name, value in counts.items()}, **own)
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    while True:
        try:
            work, args = end.recv()
        except EOFError:  # the tests are over
            return
        try:
            end.send((work(*args), None))
        except BaseException:
            end.send((None, traceback.format_exc()))
        set_imports_apart()
        # Accelerate sets them for the life of the process: the next test's run would be taken for one of its launcher
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            del os.environ[name]
