"""A safetensors file of whole tensors, written by many ranks at once, each its own pieces at their places.

The format (https://github.com/huggingface/safetensors): 8 bytes with the header's length, the header as JSON (dtype,
shape and place of each tensor), then the tensors row by row. Nothing in the file shows which layout wrote it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drivetrain.checkpoint.state import Formless
from drivetrain.distributed.shard import Shard
from drivetrain.runtime import storage

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
READ_AT_ONCE = 2**24


@dataclass(frozen=True)
class Kind:
    """Dtype and shape of a whole tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """header: the file's beginning. starts: the byte at which each tensor begins. size: of the whole file."""

    header: bytes
    starts: dict[str, int]
    size: int


def kind_of(tensor: Tensor | Shard) -> Kind:
    """Returns a tensor's kind. Raises Formless for a dtype that the format has no name for."""
    if tensor.dtype not in DTYPES:
        raise Formless(f"a tensor of {tensor.dtype} has no form in a checkpoint")
    return Kind(tensor.dtype, tuple(tensor.shape))


def lay_out(kinds: Mapping[str, Kind]) -> Layout:
    """Lays the file out: widest dtypes first, so that each tensor begins where its dtype may be read in place; then by
    name."""
    place, places = 0, dict[str, int]()
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, kind in sorted(kinds.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        offsets = [place, place + kind.bytes]
        head[name] = {"dtype": DTYPES[kind.dtype], "shape": list(kind.shape), "data_offsets": offsets}
        places[name], place = place, offsets[1]
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    starts = {name: begin + own for name, own in places.items()}
    return Layout(len(text).to_bytes(8, "little") + text, starts, begin + place)


def create(file: Path, layout: Layout) -> None:
    """Writes the header and reserves room for the rest. Raises OSError if the disk has none."""
    storage.reserve(file, layout.header, layout.size)


def fill(file: Path, layout: Layout, tensors: Mapping[str, Tensor | Shard]) -> None:
    """Writes this rank's tensors, and syncs them to the disk."""
    storage.fill(file, _runs(layout, tensors))


def differing(file: Path, layout: Layout, tensors: Mapping[str, Tensor | Shard]) -> list[str]:
    """Reads this rank's tensors back; returns names of those that differ from memory."""
    with file.open("rb") as opened:
        return [
            name
            for name, tensor in tensors.items()
            if not all(_holds(opened.fileno(), run, place) for place, run in _runs(layout, {name: tensor}))
        ]


def _runs(layout: Layout, tensors: Mapping[str, Tensor | Shard]) -> Iterator[tuple[int, memoryview]]:
    """Yields (place in the file, bytes)."""
    for name, tensor in tensors.items():
        start = layout.starts[name]
        if isinstance(tensor, Shard):
            near = dataclasses.replace(tensor, tensor=tensor.tensor.detach().cpu().contiguous())
            for first, run in near.runs():
                yield start + first * run.dtype.itemsize, _bytes(run)
        elif tensor.numel():
            yield start, _bytes(tensor.detach().cpu().contiguous().reshape(-1))


def _bytes(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data


def _holds(descriptor: int, data: memoryview, place: int) -> bool:
    buffer = np.empty(min(len(data), READ_AT_ONCE), dtype=np.uint8)
    while data:
        found = buffer[: os.preadv(descriptor, [buffer[: len(data)].data], place)]
        if not len(found) or not np.array_equal(found, np.asarray(data[: len(found)])):
            return False
        data, place = data[len(found) :], place + len(found)
    return True
