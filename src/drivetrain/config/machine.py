"""The machine a run is checked against, as a value: this one, or one that the user asks about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One host as the rules see it."""

    device: str  # "cpu" or "cuda"
    device_name: str
    device_count: int
    memory_bytes: int  # of one device; of the host for "cpu"
    cpu_cores: int  # that this process may use
    compute_capability: tuple[int, int] | None  # NVIDIA only
    native_dtypes: frozenset[str]  # dtypes whose matrix products the device has instructions for
    packages: frozenset[str] | None = None  # optional ones that are installed; None: not asked
    unused: str | None = None  # a device that PyTorch sees here and no run takes
