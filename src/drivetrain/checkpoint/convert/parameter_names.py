"""Renames others' tensors to the names of the run's model."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
SAMPLES = 16  # names that are asked where they stand, of what may be many thousands
WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")  # compile, FSDP1


def named(given: Mapping[str, T], wanted: Collection[str]) -> dict[str, T]:
    """Removes a prefix of all names (module., model., ...) if the wanted names remain behind it.

    With such a prefix, names without it are left out; without one, all stay.
    """
    plain = {WRAPPERS.sub(r"\1", name).replace("..", ".").removeprefix("."): value for name, value in given.items()}
    some = list(wanted)[:: max(1, len(wanted) // SAMPLES)]
    candidates = {name.removesuffix(one) for one in some for name in plain if name.endswith(one)} | {""}
    before = {each for each in candidates if not each or each.endswith(".")}
    best = max(sorted(before, key=len), key=lambda prefix: sum(prefix + name in plain for name in wanted))
    return {name.removeprefix(best): value for name, value in plain.items() if name.startswith(best)}


def shaped(given: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Restores the shape of tensors: ZeRO-3 leaves whole ones flat."""
    return {
        name: tensor.view(shapes[name]) if _is_flat(tensor, shapes.get(name)) else tensor
        for name, tensor in given.items()
    }


def _is_flat(tensor: Tensor, shape: torch.Size | None) -> bool:
    return shape is not None and tensor.ndim == 1 != len(shape) and tensor.numel() == math.prod(shape)


def with_tied(given: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adds tensors that the model has under several names, of which some formats keep one. model: its own state."""
    names_of: dict[tuple[int, torch.Size], list[str]] = {}
    for name, tensor in model.items():
        if tensor.numel():
            names_of.setdefault((tensor.data_ptr(), tensor.shape), []).append(name)
    found = dict(given)
    for names in names_of.values():
        there = [name for name in names if name in given]
        for name in names if there else []:
            found.setdefault(name, given[there[0]])
    return found
