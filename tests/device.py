"""The device that tests run on, which take the `device` fixture: the CPU, or a GPU with `pytest --device cuda`.

Ranks are processes of their own and find it in the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

VARIABLE = "DRIVETRAIN_TEST_DEVICE"
KNOWN = ("cpu", "cuda")


def chosen_device() -> str:
    return os.environ.get(VARIABLE) or "cpu"


def on(device: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a batch or of weights on a device."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def missing(device: str) -> str | None:
    """Returns why the device cannot be taken, or None."""
    if device not in KNOWN:
        return f"{device} is no device of the tests: {' or '.join(KNOWN)}"
    if device == "cuda" and not torch.cuda.is_available():
        return "cuda was given, but PyTorch sees no GPU here"
    return None
