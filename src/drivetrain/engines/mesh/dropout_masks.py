"""Dropout under tensor parallelism: one mask for tensors that ranks hold copies of, separate masks for those that they
split.

Tensor ranks draw from one random stream, or their copies would diverge. Between the two layers of a pair (in attention,
in a feed-forward part) each rank has other heads or features, and the shared stream would drop the same ones of each
rank's. There masks are drawn from a stream that is derived from the shared one and the rank (Megatron-LM keeps a second
state of the generator instead), so that recomputing a block, which restores the shared one, draws the same masks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.models.adapted_layers import adapted_layers

State = tuple[Tensor, Tensor | None]  # of the generators of the CPU and of the GPU


def own_masks(model: nn.Module, plan: Mapping[str, str], rank: int) -> None:
    """Gives split layers masks of their own, in place. plan: module name → style."""
    if not any(drops(module) for module in model.modules()):
        return  # reading and setting generators would cost a little, and break compiled blocks up
    streams = _Streams(rank)
    adapted = adapted_layers(model)
    for name, style in plan.items():
        module = model.get_submodule(name)
        if style == "colwise":
            module.register_forward_hook(streams.part)
            for within in module.modules():
                if within is not module and drops(within):  # an adapter's, of inputs that all ranks have
                    within.register_forward_pre_hook(streams.lend)
                    within.register_forward_hook(streams.take_back)
        elif style == "rowwise" and name in adapted:  # whose adapter drops its own part of the inputs
            module.register_forward_hook(streams.join)
        elif style in ("rowwise", "rowwise_split_input"):
            module.register_forward_pre_hook(streams.join)


def drops(module: nn.Module) -> bool:
    """Returns whether a module drops: Transformers' attention keeps its rate as a number; a dropout module's is called
    p."""
    rates = (v for k, v in vars(module).items() if "drop" in k or (k == "p" and "Drop" in type(module).__name__))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


class _Streams:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._shared: State | None = None  # to go back to
        self._own: State | None = None  # while the shared one is lent
        self._seed = 0

    @property
    def _parted(self) -> bool:
        """False where recomputing ended between a pair, once it had what it needed, and restored the generators
        itself."""
        return self._shared is not None and torch.initial_seed() == self._seed

    @torch.compiler.disable
    def part(self, module: nn.Module, args: Any, output: Any) -> None:
        del args, output
        if not module.training or self._parted:
            return
        self._seed = int(torch.randint(2**62, ())) + self._rank
        self._shared = _state()
        torch.manual_seed(self._seed)

    @torch.compiler.disable
    def join(self, *_: Any) -> None:
        if self._parted:
            _go_on(self._shared)
        self._shared = None

    @torch.compiler.disable
    def lend(self, module: nn.Module, args: Any) -> None:
        """Returns to the shared stream for one draw."""
        del args
        self._own = _state() if module.training and self._parted else None
        if self._own is not None:
            _go_on(self._shared)

    @torch.compiler.disable
    def take_back(self, *_: Any) -> None:
        if self._own is not None:
            self._shared = _state()
            _go_on(self._own)
        self._own = None


def _state() -> State:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def _go_on(state: State | None) -> None:
    assert state is not None
    cpu, gpu = state
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)
