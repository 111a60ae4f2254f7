"""Measures large matrix products on the device: the reference for a model's FLOP/s."""

from __future__ import annotations

import statistics
import time

import torch

_LEAST_SECONDS = 0.02  # one timed product takes at least this long, or the matrices grow


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the FLOP/s of a square matrix product in `dtype`: the median of five, about 0.3 s in all.

    2 n^3 floating-point operations for n x n matrices (Golub and Van Loan, Matrix Computations, 1.1.11).
    """
    size = 512
    while True:
        left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
        _product_seconds(left, right, device)
        if _product_seconds(left, right, device) >= _LEAST_SECONDS or size >= 8192:
            break
        size *= 2
    return 2 * size**3 / statistics.median(_product_seconds(left, right, device) for _ in range(5))


def _product_seconds(left: torch.Tensor, right: torch.Tensor, device: torch.device) -> float:
    _synchronise(device)
    start = time.perf_counter()
    left @ right
    _synchronise(device)
    return time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
