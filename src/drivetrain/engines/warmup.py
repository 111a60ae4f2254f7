"""Runs forward and backward before the first step, so that frameworks build what they need; nothing else remains."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from drivetrain.distributed.rng import restore_rng_state, rng_state


def rehearse(model: nn.Module, loss: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> None:
    """Runs with gradients of 0; restores generators and buffers afterwards."""
    state, buffers = rng_state(), [buffer.clone() for buffer in model.buffers()]
    model.train()
    backward(loss() * 0)
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    restore_rng_state(state)
