"""A nested state ↔ a flat dict of tensors and a JSON tree: no pickle, so loading runs no code.

The tree mirrors the state; what JSON has no form for is a single-key object whose key starts with "$": a tensor, a
tuple, a float that is not finite, a dict whose own keys could be mistaken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

State = Any  # nested dicts (str keys), lists and tuples of tensors, numbers, strings, booleans and None


def split(state: State) -> tuple[dict[str, Tensor], Any]:
    """State → (tensors under made-up keys, JSON-able tree). TypeError for anything that has no safe form."""
    tensors: dict[str, Tensor] = {}
    return tensors, _encode(state, tensors, "")


def join(tensors: Mapping[str, Tensor], tree: Any) -> State:
    """The reverse of `split`."""
    if isinstance(tree, list):
        return [join(tensors, item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        (key, value), *_ = tree.items()
        match key:
            case "$tensor":
                return _restored(tensors[value["key"]], value["channels_last"])
            case "$tuple":
                return tuple(join(tensors, item) for item in value)
            case "$float":
                return float(value)
            case "$dict":
                return {name: join(tensors, item) for name, item in value.items()}
    return {name: join(tensors, item) for name, item in tree.items()}


def _encode(value: State, tensors: dict[str, Tensor], path: str) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu()
        return {"$tensor": {"key": path, "channels_last": is_channels_last(value)}}
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"{path}: the key {name!r} is no string")
        encoded = {name: _encode(item, tensors, f"{path}/{_escaped(name)}") for name, item in value.items()}
        mistakable = len(encoded) == 1 and next(iter(encoded)).startswith("$")
        return {"$dict": encoded} if mistakable else encoded
    if isinstance(value, tuple):
        return {"$tuple": [_encode(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_encode(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{path}: a {type(value).__name__} has no form in a checkpoint")


def is_channels_last(tensor: Tensor) -> bool:
    """Whether a 4-D tensor lies channels-last in memory (and not in both orders at once)."""
    return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _restored(tensor: Tensor, channels_last: bool) -> Tensor:
    # other strides may choose other kernels, whose sums round differently: exact resume needs the same layout
    return tensor.contiguous(memory_format=torch.channels_last) if channels_last else tensor


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")  # as in JSON Pointer, RFC 6901: keys stay distinct
