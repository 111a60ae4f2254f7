"""Counts the floating-point operations of the code run inside a block."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch._C import DispatchKey
from torch.utils.flop_counter import flop_registry

from drivetrain.measure.observer import Observer
from drivetrain.memory.transfers import on_host


class FlopCount(Observer):
    """Counts matrix products, convolutions and attention, forward and backward: `total` after the block.

    For sharded tensors (DTensor) it counts what this rank computes; PyTorch's own FlopCounterMode counts the whole
    product. It does not count compiled code (FlexAttention's kernels; torch.compile), and flash-attn's own kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._one_at_a_time = threading.Lock()  # dp's replicas on a CPU

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs the operator, or its decomposition, so that the products within it are counted."""
        if formula_of(func) is None and not _has_kernel(func):
            try:
                with self:
                    found = func.decompose(*args, **kwargs)
            except Exception as error:  # if it is the operator's own, it comes again below
                self.failure = self.failure or error
                found = NotImplemented
            if found is not NotImplemented:
                return found
        return func(*args, **kwargs)

    def _observe(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        formula = formula_of(func)
        if formula is not None:
            with self._one_at_a_time:
                self.total += formula(*args, **kwargs, out_val=result)


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Shapes (B, heads, T, width). Two products over all pairs of positions: of queries with keys, of scores with
    values. Grouped heads of keys and values are computed once for each of the query's (torch 2.11's formula is an error
    for them)."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (width + value[3])


def _attention_backward(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Five products: the scores made again, and the gradients of scores, queries, keys and values."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (3 * width + 2 * value[3])


def _forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return _attention(query.shape, key.shape, value.shape)


def _backward(gradient: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    del gradient
    return _attention_backward(query.shape, key.shape, value.shape)


def _flex_backward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return _attention_backward(query.shape, key.shape, value.shape)


def _varlen(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *_: Any, **__: Any) -> int:
    return sum(_attention(*shapes) for shapes in _sequences(query, key, value, starts))


def _varlen_backward(
    gradient: Any, query: Tensor, key: Tensor, value: Tensor, out: Any, lse: Any, starts: Tensor, *_: Any, **__: Any
) -> int:
    del gradient, out, lse
    return sum(_attention_backward(*shapes) for shapes in _sequences(query, key, value, starts))


def _sequences(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> list[list[tuple[int, ...]]]:
    """Shapes of each sequence of rows laid end to end, (T, heads, width); starts: (S + 1,). Waits for the device unless
    the host has the numbers."""
    lengths = np.diff(on_host(starts)).tolist()
    return [[(1, t.shape[1], length, t.shape[2]) for t in (query, key, value)] for length in lengths]


def _apart(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *_: Any, **__: Any) -> int:
    return sum(_attention(*shapes) for shapes in _sequences_and_branches(query, key, value, bounds))


def _apart_backward(
    gradient: Any, query: Tensor, key: Tensor, value: Tensor, out: Any, sums: Any, bounds: Tensor, *_: Any, **__: Any
) -> int:
    del gradient, out, sums
    return sum(_attention_backward(*shapes) for shapes in _sequences_and_branches(query, key, value, bounds))


def _sequences_and_branches(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Iterator[list[list[int]]]:
    """Yields the shapes of each sequence's queries, keys and values, (1, heads, T, width); a branch has its own keys
    and those that it shares. bounds: as `packed_attention.bounds_of` makes them."""
    for tables in on_host(bounds)[:, :, 0]:
        lengths = np.diff(tables[0])
        seen = lengths + (tables[1, :-1] if len(tables) == 2 else 0)
        for length, keys in zip(lengths.tolist(), seen.tolist(), strict=True):
            if length:
                counts = (length, keys, keys)
                tensors = (query, key, value)
                yield [[1, t.shape[1], count, t.shape[3]] for t, count in zip(tensors, counts, strict=True)]


def _grouped(first: Tensor, second: Tensor, *_: Any, **__: Any) -> int:
    """A product of groups of rows, each with a matrix of its own, as a mixture's experts are: (rows, k) with
    (groups, k, columns), or one of its two gradients, of which another side is divided. Each row is in one group, so
    that the groups together are one product; where both have three dimensions each group is a whole one."""
    groups = first.shape[0] if first.dim() == second.dim() == 3 else 1
    return 2 * groups * first.shape[-2] * first.shape[-1] * second.shape[-1]


def _grouped_backward(rows: Tensor, matrices: Tensor, *_: Any, **__: Any) -> int:
    """Transformers' own operator, which makes both gradients."""
    return 2 * _grouped(rows, matrices)


# before PyTorch's own table, which lacks the CPU's fused attention, products of groups and, in some versions, grouped
# heads
_OWN: dict[str, Callable[..., int]] = {
    **{
        f"aten._scaled_dot_product_{kind}": _forward
        for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    },
    **{
        f"aten._scaled_dot_product_{kind}_backward": _backward
        for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    },
    "flex_attention": _forward,
    "flex_attention_backward": _flex_backward,
    "drivetrain.attend_apart": _apart,
    "drivetrain.attend_apart_backward": _apart_backward,
    "torch_attn._varlen_attn": _varlen,
    "torch_attn._varlen_attn_backward": _varlen_backward,
    "aten._grouped_mm": _grouped,
    "transformers.grouped_mm_fallback": _grouped,  # of GPUs before compute capability 8.0, and of compiled code
    "transformers.grouped_mm_fallback_backward": _grouped_backward,
}


@functools.cache
def formula_of(func: Any) -> Callable[..., int] | None:
    """Returns the function of an operator's arguments and result (`out_val`) that counts its FLOPs; None for those that
    compute little."""
    packet = getattr(func, "_overloadpacket", func)  # an operator that takes functions has no overloads
    return _OWN.get(str(packet)) or flop_registry.get(packet)


@functools.cache
def _has_kernel(func: Any) -> bool:
    """Returns whether the operator has a kernel of its own: its decomposition would round otherwise (silu_backward),
    and counting must not change results."""
    if not hasattr(func, "has_kernel_for_dispatch_key") or not hasattr(func, "decompose"):
        return True
    if func.namespace == "prim":  # a question about a tensor (its device), which fake tensors put through
        return True
    return bool(func.has_kernel_for_dispatch_key(DispatchKey.CPU) or func.has_kernel_for_dispatch_key(DispatchKey.CUDA))
