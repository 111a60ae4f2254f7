"""bf16 and fp16 on a CPU that has no instructions for them.

PyTorch then falls back to scalar kernels: a 512 x 512 product in bf16 took 203 ms where fp32 took 2 ms (two AVX2
cores, torch 2.13). Tensor cores and AVX-512 BF16 multiply half-precision inputs and accumulate in fp32, then round
once. The same arithmetic is had from the fp32 kernels: inputs already rounded to 16 bits are exact in fp32, their
products too, sums accumulate in fp32, and the result is rounded back. So matrix products and convolutions of 16-bit
inputs are sent to the fp32 kernels, everything else stays with PyTorch.

The kernels are replaced below autograd and autocast, at the CPU dispatch key, so that dtypes, gradients and what is
saved for the backward pass are what PyTorch makes them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
_LOW = frozenset({torch.float16, torch.bfloat16})


@contextmanager
def fp32_products(active: bool) -> Iterator[None]:
    """Within, if active, 16-bit matrix products and convolutions on the CPU run as rounded fp32 products."""
    if not active:
        yield
        return
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch warns whenever a kernel is replaced; replacing them is the purpose here
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name in OPERATORS:
            _replace(library, name)
    try:
        yield
    finally:
        library._destroy()


def _replace(library: Library, name: str) -> None:
    original: Any = get_kernel(f"aten::{name}", "CPU")

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = next(arg.dtype for arg in args if isinstance(arg, Tensor))
        if dtype not in _LOW:
            return original.call_boxed(keyset, *args, **kwargs)
        result = original.call_boxed(keyset, *(_widened(arg) for arg in args), **kwargs)
        if isinstance(result, Tensor):
            return result.to(dtype)
        return tuple(part.to(dtype) if isinstance(part, Tensor) else part for part in result)

    library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value
