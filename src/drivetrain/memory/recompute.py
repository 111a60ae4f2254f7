"""Recompute (activation checkpointing): blocks forget their activations and compute them again for the backward pass.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". Results are the same, dropout included: PyTorch
restores the generator for the second forward. Selective recompute keeps what is costly to compute, the outputs of
matrix products, convolutions and attention, and computes the rest again (Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", draw the line elsewhere: they recompute attention).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from drivetrain.errors import problem

P = ParamSpec("P")
T = TypeVar("T")

aten = torch.ops.aten
KEPT = {  # what selective recompute does not compute twice
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_mm.default,  # in 8 bits
}
# of packages that may not be there, or register them late: attention over sequences end to end
KEPT_BY_NAME = {
    "torch_attn._varlen_attn.default",
    "flash_attn._flash_attn_forward.default",
    "flash_attn._flash_attn_varlen_forward.default",
}
_selective = WeakSet[TorchDispatchMode]()  # modes that see the operations of blocks which recompute selectively
_of_classes = WeakSet[Callable[..., Any]]()  # forward passes that do what the block's class does, recomputed


def apply_recompute(model: nn.Module, selective: bool = False, blocks: Sequence[nn.Module] | None = None) -> int:
    """Makes the model's repeated blocks recompute, in place; parameter names stay. Returns the number of blocks.

    blocks: the blocks, if the caller knows them.
    """
    blocks = repeated_blocks(model) if blocks is None else blocks
    if not blocks:
        raise problem(
            "recompute", f"{type(model).__name__} has no repeated blocks in a ModuleList or Sequential", "leave it out"
        )
    for block in blocks:
        how: dict[str, Any] = {"context_fn": _selective_contexts} if selective else {}
        is_of_class, block.forward = "forward" not in vars(block), _recomputed(block.forward, how)
        if is_of_class:
            _of_classes.add(block.forward)
    return len(blocks)


def does_as_its_class(module: nn.Module) -> bool:
    """Returns whether the module's forward pass is its class's, recomputed or not, and no other in its place."""
    forward = vars(module).get("forward")
    return forward is None or forward in _of_classes


def _recomputed(forward: Callable[..., Any], how: dict[str, Any]) -> Callable[..., Any]:
    """Wraps the forward pass in a function of this file: torch.compile skips functions that torch itself defines, or a
    partial."""

    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **how, **kwargs)

    return again


def _selective_contexts() -> Any:
    contexts = create_selective_checkpoint_contexts(_policy)
    _selective.update(contexts)
    return contexts


def beside_selective(do: Callable[P, T]) -> Callable[P, T]:
    """Wraps a function that an engine calls among a block's operations, such as one that gathers a layer's weights.
    Selective recompute does not see what it does: a second forward pass that gathers more than the first one would not
    be the same pass."""

    @functools.wraps(do)
    def beside(*args: P.args, **kwargs: P.kwargs) -> T:
        if _get_current_dispatch_mode() not in _selective:
            return do(*args, **kwargs)
        with _pop_mode_temporarily():
            return do(*args, **kwargs)

    return beside


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001  torch's signature
    return CheckpointPolicy.MUST_SAVE if _is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _is_kept(operator: Any) -> bool:
    return operator in KEPT or str(operator) in KEPT_BY_NAME


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the outermost modules that repeat: children of one container, of one class, with parameters and
    submodules.

    A bare layer is left out: its input would be kept all the same, and nothing saved.
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
