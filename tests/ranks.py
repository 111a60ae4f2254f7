"""Processes that form a gloo group, as the ranks of a run do, and do one thing after another for the tests.

Starting some costs ten seconds; a test session starts as many as it needs once. After a failure they start anew.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 900  # a rank that hangs is a failure, not a test that never ends


class RankPool:
    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[BaseProcess] = []
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
        context = multiprocessing.get_context("spawn")
        folder = tempfile.mkdtemp(prefix="ranks-")
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(target=_rank, args=(rank, self.world, folder, there), daemon=True)
            process.start()
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
    counts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in counts.items()}, DS_ACCELERATOR="cpu")
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
        for name in [name for name in os.environ if name.startswith("ACCELERATE_USE_")]:
            del os.environ[name]  # Accelerate sets it for the life of the process
