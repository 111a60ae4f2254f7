"""The device that a trace stands for: a plan's tensors lie on the CPU, and its kernels are those of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from drivetrain.config.machine import Machine

_PLANNED: list[Machine] = []


@contextmanager
def planned_for(machine: Machine) -> Iterator[None]:
    """While the block runs, losses are cut and kernels chosen as on the devices of this machine."""
    _PLANNED.append(machine)
    try:
        yield
    finally:
        _PLANNED.pop()


def planned_machine() -> Machine | None:
    """Returns the machine that is planned for; None where nothing is."""
    return _PLANNED[-1] if _PLANNED else None


def kind_of_device(tensor: Tensor) -> str:
    return _PLANNED[-1].device if _PLANNED else tensor.device.type
