"""Forward and backward before the first step, of which nothing stays but what frameworks build on the way."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from drivetrain.distributed.rng import restore_rng_state, rng_state


def rehearse(model: nn.Module, loss: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> None:
    """Gradients of 0; generators and buffers end as they were."""
    state, buffers = rng_state(), [buffer.clone() for buffer in model.buffers()]
    model.train()
    backward(loss() * 0)
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    restore_rng_state(state)
