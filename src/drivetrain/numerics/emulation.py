"""Computes bf16 and fp16 on a CPU that has no instructions for them.

PyTorch then falls back to scalar kernels: a 512 x 512 product in bf16 took 203 ms where fp32 took 2 ms (two AVX2 cores,
torch 2.13). Tensor cores and AVX-512 BF16 multiply half-precision inputs and accumulate in fp32, then round once. The
fp32 kernels can do the same arithmetic: inputs already rounded to 16 bits are exact in fp32, their products too, sums
accumulate in fp32, and the result is rounded back. So matrix products and convolutions of 16-bit inputs are sent to the
fp32 kernels, everything else stays with PyTorch. Fused attention goes the same way; its probabilities then stay in fp32
between its two products, where hardware rounds them.

The kernels are replaced below autograd and autocast, at the CPU dispatch key, so that dtypes, gradients and saved
tensors are those of PyTorch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
WRITING = ("mm.out", "addmm.out", "addmm_", "bmm.out", "baddbmm.out", "baddbmm_")  # torch.compile calls the .out ones
ATTENTION = tuple(f"_scaled_dot_product_flash_attention_for_cpu{part}" for part in ("", "_backward"))
_LOW = frozenset({torch.float16, torch.bfloat16})


@contextmanager
def fp32_products(active: bool) -> Iterator[None]:
    """While the block runs, if active, 16-bit matrix products, convolutions and attention on the CPU run as rounded
    fp32 ones."""
    if not active:
        yield
        return
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch warns whenever a kernel is replaced; replacing them is the purpose here
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name in (*PRODUCTS, *WRITING, *ATTENTION):
            original: Any = get_kernel(f"aten::{name}", "CPU")
            kernel = _writing(original) if name in WRITING else _returning(original, fp32_too=name in ATTENTION)
            library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _returning(original: Any, fp32_too: bool) -> Callable[..., Any]:
    """Replaces operators that return new tensors. fp32_too: they take and return fp32 tensors as well (attention: mask,
    log-sum-exp)."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        low = _low_dtype(args, fp32_too)
        if low is None:
            return original.call_boxed(keyset, *args, **kwargs)
        result = original.call_boxed(keyset, *map(_widened, args), **{k: _widened(v) for k, v in kwargs.items()})
        if isinstance(result, Tensor):
            return result.to(low)
        if fp32_too and len(result) == 2:
            output, logsumexp = result
            return output.to(low), logsumexp
        return tuple(part.to(low) if isinstance(part, Tensor) else part for part in result)

    return kernel


def _writing(original: Any) -> Callable[..., Tensor]:
    """Replaces operators that write into `out` or into their first argument, and return it."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Tensor:
        target: Tensor = kwargs.get("out", args[0])
        low = _low_dtype((*args, target), False)
        if low is None:
            original.call_boxed(keyset, *args, **kwargs)
            return target
        result = original.call_boxed(keyset, *map(_widened, args), **{k: _widened(v) for k, v in kwargs.items()})
        return target.resize_(result.shape).copy_(result)

    return kernel


def _low_dtype(args: Sequence[Any], fp32_too: bool) -> torch.dtype | None:
    """Returns the 16-bit dtype of the arguments; None if they are fp32, or mixed: PyTorch's kernel then refuses
    them."""
    dtypes = {arg.dtype for arg in args if isinstance(arg, Tensor)}
    if fp32_too:
        dtypes.discard(torch.float32)
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= _LOW else None


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value
