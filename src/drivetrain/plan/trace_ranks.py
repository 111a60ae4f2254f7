"""One process in the place of a rank among many, whose collectives take part in nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.real_numbers import real_numbers

T = TypeVar("T")


class TracedRanks(Communicator):
    """The ranks of a traced run. Objects come back as this rank gave them: all others would give the same."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world  # without the group for objects, which would need a network
        self._control = self._asking = None

    def all_gather(self, value: T) -> list[T]:
        return [value] * self.world

    def gather(self, value: T) -> list[T] | None:
        return [value] * self.world if self.is_first else None

    def on_first(self, do: Callable[[], T]) -> T:
        return do()


@contextmanager
def fake_ranks(rank: int, world: int) -> Iterator[TracedRanks]:
    """Makes this process the given rank of so many. Tensors that ranks exchange need not hold numbers.

    A group of one is made too, which engines that shard ask for.
    """
    assert not dist.is_initialized(), "a trace runs in a process that belongs to no group of ranks"
    hook, before = sys.excepthook, dict(os.environ)  # dist replaces the hook by one that names the rank
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))  # as DeepSpeed reads them
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with _joined_meshes():
            yield TracedRanks(rank, world)
    finally:
        dist.destroy_process_group()
        _forget_meshes()
        sys.excepthook = hook
        os.environ.clear()
        os.environ.update(before)


def _forget_meshes() -> None:
    """Empties the caches of distributed tensors: they hold meshes, and with them names of groups that are gone, for any
    later mesh of the same shape."""
    clear = getattr(debug, "_clear_sharding_prop_cache", None)  # not a public name: it may go
    if clear is not None:
        clear()


@contextmanager
def _joined_meshes() -> Iterator[None]:
    """Lets FSDP join its mesh and that of tensor parallel: the numbers of the ranks in it are real ones."""
    join: Callable[..., DeviceMesh] = DeviceMesh._concatenate

    def with_numbers(meshes: list[DeviceMesh]) -> DeviceMesh:
        with real_numbers():
            return join(meshes)

    DeviceMesh._concatenate = staticmethod(with_numbers)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DeviceMesh._concatenate = staticmethod(join)  # type: ignore[method-assign]
