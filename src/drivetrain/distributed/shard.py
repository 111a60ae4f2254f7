"""Shards: the part of a spread tensor that a rank holds, and its position in the whole tensor.

Whole tensors lie in files row by row. A shard is a box of the whole (DTensor's shards), or a stretch of its numbers in
that order (ZeRO's): either way it is runs of numbers that lie next to each other in the file, and every rank can write
its own into one file without communication.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Shard:
    """A rank's part of a tensor. offset: index of its first element in the whole. One number for a flat tensor: counted
    along the rows."""

    tensor: Tensor
    shape: torch.Size  # of the whole
    offset: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The position; two shards have the same one only if they are the same part of the whole."""
        return self.offset, tuple(self.tensor.shape)

    def runs(self) -> Iterator[tuple[int, Tensor]]:
        """Yields (number of the first element in the whole, consecutive elements), in order."""
        if not self.tensor.numel():
            return
        if len(self.offset) == 1:
            yield self.offset[0], self.tensor.reshape(-1)
            return
        sizes, strides = self.tensor.shape, torch.empty(self.shape, device="meta").stride()
        cut = max((axis for axis, size in enumerate(sizes) if size != self.shape[axis]), default=0)
        begin = sum(start * stride for start, stride in zip(self.offset, strides, strict=True))
        rows = self.tensor.reshape(math.prod(sizes[:cut]), -1)
        for row, index in enumerate(itertools.product(*map(range, sizes[:cut]))):
            yield begin + sum(i * stride for i, stride in zip(index, strides, strict=False)), rows[row]


def piece_of(tensor: Tensor) -> Tensor | Shard:
    """Returns this rank's shard of a sharded tensor; any other tensor unchanged."""
    return like(tensor.to_local(), tensor) if isinstance(tensor, DTensor) else tensor


def like(local: Tensor, sharded: Tensor) -> Tensor | Shard:
    """Returns this rank's part of a whole tensor, sharded as another tensor is."""
    if not isinstance(sharded, DTensor):
        return local
    (chunk,) = sharded.__create_chunk_list__()
    if tuple(chunk.sizes) != tuple(local.shape):
        raise ValueError(f"a shard of {tuple(local.shape)}, where {tuple(chunk.sizes)} belongs")
    return Shard(local, sharded.shape, tuple(chunk.offsets))
