"""Dropout under tensor parallelism: one mask for what ranks hold copies of, masks of their own for what they share out.

Tensor ranks draw from one random stream, or their copies would part. Between the two layers of a pair (in attention,
in a feed-forward part) each rank has other heads or features, and the shared stream would drop the same ones of each
rank's. There a stream is drawn from that follows from the shared one and the rank (Megatron-LM keeps a second state of
the generator instead), so that recomputing a block, which restores the shared one, draws the same masks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def own_masks(model: nn.Module, plan: Mapping[str, str], rank: int) -> None:
    """In place. plan: module name → style."""
    if not any(_drops(module) for module in model.modules()):
        return  # reading and setting generators would cost a little, and break compiled blocks up
    streams = _Streams(rank)
    for name, style in plan.items():
        if style == "colwise":
            model.get_submodule(name).register_forward_hook(streams.part)
        elif style in ("rowwise", "rowwise_split_input"):
            model.get_submodule(name).register_forward_pre_hook(streams.join)


def _drops(module: nn.Module) -> bool:
    """Transformers' attention keeps its rate as a number; where dropout is a module, that is called p."""
    rates = (v for k, v in vars(module).items() if "drop" in k or (k == "p" and "Drop" in type(module).__name__))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


class _Streams:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._shared: tuple[Tensor, Tensor | None] | None = None  # the states to go back to
        self._seed = 0

    @property
    def _parted(self) -> bool:
        """Recomputing may end between a pair, once it has what it is for, and puts the generators back by itself."""
        return self._shared is not None and torch.initial_seed() == self._seed

    @torch.compiler.disable
    def part(self, module: nn.Module, args: Any, output: Any) -> None:
        del args, output
        if not module.training or self._parted:
            return
        self._seed = int(torch.randint(2**62, ())) + self._rank
        self._shared = torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        torch.manual_seed(self._seed)

    @torch.compiler.disable
    def join(self, module: nn.Module, args: Any) -> None:
        del module, args
        if self._parted:
            assert self._shared is not None
            cpu, gpu = self._shared
            torch.set_rng_state(cpu)
            if gpu is not None:
                torch.cuda.set_rng_state(gpu)
        self._shared = None
