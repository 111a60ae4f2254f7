"""Splits a nested state into a flat dict of tensors and a JSON tree, and joins them: no pickle, so loading runs no
code.

The tree mirrors the state; a value that JSON cannot hold is a single-key object whose key starts with "$": a tensor, a
tuple, a float that is not finite, a dict whose own keys could be mistaken. A tensor that occurs twice is kept once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.distributed.shard import Shard


class Formless(TypeError):
    """A value that cannot be saved."""


State = Any  # nested dicts (str keys), lists and tuples of tensors, pieces of them, numbers, strings, booleans and None


def split(state: State) -> tuple[dict[str, Tensor | Shard], Any]:
    """Returns (tensors and pieces of them, JSON-able tree). Nothing is copied.

    A tensor's key is its path with slashes between, so a flat dict of tensors keeps its keys. Subclasses of dict, list,
    tuple and number come back as what they derive from. Raises Formless for anything that has no safe form.
    """
    tensors: dict[str, Tensor | Shard] = {}
    return tensors, _Encoder(tensors).encode(state, ())


def join(tensors: Mapping[str, Tensor], tree: Any) -> State:
    """Reverses `split`. Ties are kept: a tensor that occurred twice is one tensor again."""
    return _Decoder(tensors).decode(tree)


def same(one: State, other: State) -> bool:
    """Returns whether two states are equal to the bit, NaN included; states that `split` and `join` map to one form are
    equal."""
    if isinstance(one, Tensor):
        if not isinstance(other, Tensor) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.equal(_bytes(one), _bytes(other))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    for sequence in (list, tuple):
        if isinstance(one, sequence):
            return isinstance(other, sequence) and len(one) == len(other) and all(map(same, one, other))
    mine, theirs = _plain(one), _plain(other)
    return type(mine) is type(theirs) and repr(mine) == repr(theirs)


def replaced(state: State, by: Callable[[Tensor], Tensor]) -> State:
    """Returns the state with each tensor replaced by `by`, which is called once for a tensor that occurs twice."""
    of: dict[tuple[Any, ...], Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        identity = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if identity not in of or not tensor.numel():
            of[identity] = by(tensor)
        return of[identity]

    def walk(value: State) -> State:
        if isinstance(value, Tensor):
            return copy(value)
        if isinstance(value, Shard):
            return dataclasses.replace(value, tensor=copy(value.tensor))
        if isinstance(value, dict):
            return {name: walk(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(walk, value))
        return value

    return walk(state)


class _Encoder:
    def __init__(self, tensors: dict[str, Tensor | Shard]) -> None:
        self._tensors = tensors
        self._key_of: dict[tuple[Any, ...], str] = {}

    def encode(self, value: State, path: tuple[str, ...]) -> Any:
        if isinstance(value, Tensor | Shard):
            return {"$tensor": self._tensor(value, path)}
        if isinstance(value, dict):
            for name in value:
                if not isinstance(name, str):
                    raise Formless(f"{_at(path)} the key {name!r} is no string")
            encoded = {str.__str__(name): self.encode(item, (*path, name)) for name, item in value.items()}
            mistakable = len(encoded) == 1 and next(iter(encoded)).startswith("$")
            return {"$dict": encoded} if mistakable else encoded
        if isinstance(value, list | tuple):
            items = [self.encode(item, (*path, str(position))) for position, item in enumerate(value)]
            return {"$tuple": items} if isinstance(value, tuple) else items
        plain = _plain(value)
        if isinstance(plain, float) and not math.isfinite(plain):
            return {"$float": repr(plain)}
        if plain is None or isinstance(plain, bool | int | float | str):
            return plain
        raise Formless(f"{_at(path)} a {type(value).__name__} has no form in a checkpoint")

    def _tensor(self, given: Tensor | Shard, path: tuple[str, ...]) -> dict[str, Any]:
        tensor, place = (given.tensor, given.place) if isinstance(given, Shard) else (given, None)
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype == torch.complex128:
            raise Formless(f"{_at(path)} a tensor of {tensor.layout}, {tensor.dtype} has no form in a checkpoint")
        identity = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, place)
        key = self._key_of.get(identity) if tensor.numel() else None
        if key is None:
            key = "/".join(path)
            while key in self._tensors:  # {"a/b": ..., "a": {"b": ...}}
                key += "~"
            self._key_of[identity] = key
            self._tensors[key] = tensor.detach() if place is None else given
        strides = _own_strides(tensor) if place is None else None
        return {"key": key} if strides is None else {"key": key, "strides": strides}


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._restored: dict[str, Tensor] = {}

    def decode(self, tree: Any) -> State:
        if isinstance(tree, list):
            return [self.decode(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if len(tree) == 1:
            (key, value), *_ = tree.items()
            match key:
                case "$tensor":
                    return self._tensor(**value)
                case "$tuple":
                    return tuple(self.decode(item) for item in value)
                case "$float":
                    return float(value)
                case "$dict":
                    tree = value
        return {name: self.decode(item) for name, item in tree.items()}

    def _tensor(self, key: str, strides: list[int] | None = None) -> Tensor:
        if key not in self._restored:
            tensor = self._tensors[key]
            if strides is not None:
                if not _without_gaps(tensor.shape, strides):  # which would ask for memory without bound
                    raise ValueError(f"{key} of shape {tuple(tensor.shape)} has strides {strides}")
                empty = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
                tensor = empty.copy_(tensor)
            self._restored[key] = tensor
        return self._restored[key]


def _own_strides(tensor: Tensor) -> list[int] | None:
    """Returns the strides of a tensor laid out in another order than row-major (channels-last, transposed), without
    gaps.

    They are restored because other strides may choose other kernels, whose sums round differently: an exact resume
    needs the same layout. Views with gaps or overlaps (slices, expanded) come back row-major.
    """
    if tensor.stride() == torch.empty(tensor.shape, device="meta").stride():
        return None
    return list(tensor.stride()) if _without_gaps(tensor.shape, tensor.stride()) else None


def _without_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether a tensor of these strides takes as many places as it has numbers."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


_PLAIN: dict[type, Callable[[Any], Any]] = {  # bool before int: it is one
    bool: bool,
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
}


def _plain(value: Any) -> Any:
    """Returns a numpy float, an IntEnum, ... as the Python value it derives from."""
    for kind, convert in _PLAIN.items():
        if isinstance(value, kind):
            return convert(value)
    return value


def _bytes(tensor: Tensor) -> Tensor:
    contiguous = tensor.detach().cpu().contiguous()
    # one element counts as contiguous whatever its stride, but cannot be viewed as bytes unless that is 1
    return contiguous.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _at(path: tuple[str, ...]) -> str:
    return f"{'/'.join(path) or 'the state'}:"
