"""Recompute (activation checkpointing): blocks forget their activations and compute them again for the backward pass.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". Results are the same, dropout included: PyTorch
restores the generator for the second forward.
"""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain.errors import problem


def apply_recompute(model: nn.Module) -> int:
    """Make the model's repeated blocks recompute, in place; parameter names stay. Returns the number of blocks."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise problem(
            "recompute", f"{type(model).__name__} has no repeated blocks in a ModuleList or Sequential", "leave it out"
        )
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that repeat: children of one container, of one class, with parameters."""
    for child in model.children():
        if isinstance(model, nn.ModuleList | nn.Sequential):
            same = [other for other in model.children() if type(other) is type(child) and _has_weights(other)]
            if len(same) > 1:
                return same
    return [block for child in model.children() for block in repeated_blocks(child)]


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
