"""Measures large matrix products on the device: the reference for a model's FLOP/s."""

from __future__ import annotations

import statistics
import time

import torch

_LEAST_SECONDS = 0.02  # what is timed takes at least this long: the matrices grow, then there are several products


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the FLOP/s of a square matrix product in `dtype`: the median of five, about 0.3 s in all.

    2 n^3 floating-point operations for n x n matrices (Golub and Van Loan, Matrix Computations, 1.1.11).
    """
    size, draw = 512, torch.Generator(device)  # its own: the run's goes on as without this. Ones would draw less power
    while True:
        left, right = (torch.randn(size, size, device=device, generator=draw, dtype=dtype) for _ in range(2))
        _seconds(left, right, device, 1)
        if (one := _seconds(left, right, device, 1)) >= _LEAST_SECONDS or size >= 8192:
            break
        size *= 2
    calls = max(1, round(_LEAST_SECONDS / one))
    return 2 * size**3 / statistics.median(_seconds(left, right, device, calls) for _ in range(5))


def _seconds(left: torch.Tensor, right: torch.Tensor, device: torch.device, calls: int) -> float:
    """Returns the time of one product, of so many that are queued before the device is waited for."""
    _synchronise(device)
    start = time.perf_counter()
    for _ in range(calls):
        left @ right
    _synchronise(device)
    return (time.perf_counter() - start) / calls


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
