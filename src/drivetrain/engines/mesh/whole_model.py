"""Puts the whole model on one rank's device for a moment, before it is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

ROOM = 1.5  # times a model's weights that a device has to have free to try it there whole: gradients go one by one


@contextmanager
def placed(model: nn.Module, device: torch.device, beside: Sequence[nn.Module] = ()) -> Iterator[torch.device]:
    """Moves the model and those beside it, which lie in CPU memory, to the device if all fit; yields the device they
    are on."""
    together = [model, *beside]
    there = device if _has_room(together, device) else torch.device("cpu")
    for each in together:
        each.to(there)
    try:
        yield there
    finally:
        for each in together:
            each.to("cpu")


def _has_room(models: Sequence[nn.Module], device: torch.device) -> bool:
    size = sum(tensor.nbytes for model in models for tensor in (*model.parameters(), *model.buffers()))
    return device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > ROOM * size
