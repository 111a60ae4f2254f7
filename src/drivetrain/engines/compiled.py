"""Chooses what torch.compile compiles: the blocks that repeat, or the whole model.

Blocks that are alike share one compiled code, since their weights are an input to it. So a model of 32 layers takes as
long to compile as one of a single layer, and hooks between the blocks (that gather, offload or observe) stay in Python.
(PyTorch calls it regional compilation.) A whole model is compiled if nothing in it repeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from torch import nn

MOST_KINDS = 4  # the compiler gives up on a function that it has compiled eight times, training and evaluation apart


def compile_model(
    model: nn.Module, blocks: Sequence[nn.Module], what: bool | Literal["blocks"], by_block: bool = False
) -> str | Literal[False]:
    """Compiles in place; parameter names stay. Returns a description of what was compiled; False: nothing.

    blocks: those that repeat. what: "blocks": nothing but alike ones. by_block: blocks even where they are not alike.
    """
    if not what:
        return False
    chosen = list(blocks) if by_block else alike(blocks)
    for block in chosen:
        block.compile()
    if chosen:
        return f"{len(chosen)} blocks"
    if what != "blocks":
        model.compile()
        return "the model"
    return False


def alike(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the blocks, if they are of few kinds, each of which comes several times; else none. A kind is a class and
    the shapes of its parameters."""
    kinds = Counter(map(_kind, blocks))
    return list(blocks) if kinds and len(kinds) <= MOST_KINDS and min(kinds.values()) > 1 else []


def _kind(block: nn.Module) -> tuple[type[nn.Module], tuple[tuple[str, tuple[int, ...]], ...]]:
    return type(block), tuple((name, tuple(each.shape)) for name, each in block.named_parameters())
