"""Recompute (activation checkpointing): blocks forget their activations and compute them again for the backward pass.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". Results are the same, dropout included: PyTorch
restores the generator for the second forward.
"""

from __future__ import annotations

import functools
from collections import Counter

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
    """The outermost modules that repeat: children of one container, of one class, with parameters and parts.

    A bare layer is none: its input would be kept all the same, and nothing won.
    """
    if isinstance(model, nn.ModuleList | nn.Sequential):
        composed = [child for child in model.children() if _has_weights(child) and any(child.children())]
        classes = Counter(map(type, composed))
        repeated = [child for child in composed if classes[type(child)] > 1]
        if repeated:
            return repeated
    return [block for child in model.children() for block in repeated_blocks(child)]


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
