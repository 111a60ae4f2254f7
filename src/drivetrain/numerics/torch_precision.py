"""A precision from the table, translated into torch: dtypes, autocast, backend switches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from drivetrain.config.machine import Machine
from drivetrain.config.precision import Precision
from drivetrain.numerics.emulation import fp32_products


def dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Returns the context of a forward pass. Code inside may open autocast(enabled=False) for an fp32 island."""
    if not precision.autocast:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype(precision.compute))


def is_emulated(precision: Precision, machine: Machine) -> bool:
    return machine.device == "cpu" and precision.compute not in machine.native_dtypes


@contextmanager
def arithmetic(precision: Precision, machine: Machine) -> Iterator[None]:
    """Sets the process-wide switches of a precision while the block runs, and restores them.

    PyTorch lets cuDNN round fp32 convolutions to tf32 by default; `fp32` means fp32 here.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = precision.tf32
    try:
        with fp32_products(is_emulated(precision, machine)):
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
