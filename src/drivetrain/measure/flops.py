"""Floating-point operations of the code run inside."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def _cpu_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _cpu_attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


# PyTorch's table lacks the CPU's fused attention; shapes arrive in place of tensors
_MISSING = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}


class FlopCount:
    """Counts matrix products, convolutions and attention, forward and backward: `total` after the block."""

    total: int

    def __enter__(self) -> FlopCount:
        self._mode = FlopCounterMode(display=False, custom_mapping=_MISSING)
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)
        self.total = self._mode.get_total_flops()
