"""The device that a trace stands for: a plan's tensors lie on the CPU, and its kernels are those of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from drivetrain.config.machine import Machine

FEWEST = 4  # parts of which one stands for several


class _Name(str):
    """A text that is another object than an equal one."""

    __slots__ = ()


PLANNED_DEVICE = _Name("cpu")  # the name of the device for libraries that name its host "cpu"
_PLANNED: list[Machine] = []
_TIMES = [1]


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


def alike_parts(parts: range) -> Iterator[int]:
    """Yields the parts of a loop that does the same for each of them, the last one perhaps less. While a machine is
    planned for, the second one stands for all between it and the last: its operations count as often (`times`)."""
    if not _PLANNED or len(parts) < FEWEST:
        yield from parts
        return
    yield parts[0]
    _TIMES.append(_TIMES[-1] * (len(parts) - 2))
    try:
        yield parts[1]
    finally:
        _TIMES.pop()
    yield parts[-1]


def times() -> int:
    """Returns how many operations each one that is traced stands for."""
    return _TIMES[-1]
