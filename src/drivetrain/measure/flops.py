"""Floating-point operations of the code run inside."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


def _cpu_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _cpu_attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


# PyTorch's table lacks the CPU's fused attention
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}


class FlopCount(TorchDispatchMode):
    """Counts matrix products, convolutions and attention, forward and backward: `total` after the block.

    Of sharded tensors (DTensor) what this rank computes, where PyTorch's own FlopCounterMode counts the whole product.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._one_at_a_time = threading.Lock()  # dp's replicas on a CPU

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # asked again for the plain tensors within
        kwargs = kwargs or {}
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is None:
            return func(*args, **kwargs) if _has_kernel(func) else self._parts(func, args, kwargs)
        result = func(*args, **kwargs)
        with self._one_at_a_time:
            self.total += formula(*args, **kwargs, out_val=result)
        return result

    def _parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator is made of, that products in it are counted."""
        with self:
            found = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if found is NotImplemented else found


@functools.cache
def _has_kernel(func: Any) -> bool:
    """Of its own: its parts would round otherwise (silu_backward), and what is counted must not change."""
    return bool(func.has_kernel_for_dispatch_key(DispatchKey.CPU) or func.has_kernel_for_dispatch_key(DispatchKey.CUDA))
