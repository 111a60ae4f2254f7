"""Optimizers that keep their moments in a few bits: torchao's, which fit every engine but DeepSpeed, and bitsandbytes'.

Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization": a moment is a byte a number, which points into a
table of 256 values, and one scale for each block of 256 numbers. Li et al. 2023, "Memory Efficient Optimizers with
4-bit States": half a byte, a table of 16, blocks of 128. Both packages keep whole moments of small tensors (below 4,096
numbers), torchao also of those that blocks do not fill.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from drivetrain.errors import problem

PACKAGES = {"torchao", "bitsandbytes"}
LEAST = 4096  # numbers from which on torchao quantises a moment


def is_low_bit(cls: type[torch.optim.Optimizer]) -> bool:
    return _package(cls) in PACKAGES


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


@functools.cache
def fitted(cls: Any, compiles: bool) -> type[torch.optim.Optimizer]:
    """Returns the class as this project uses it: torchao's with three changes, any other unchanged."""
    if _package(cls) != "torchao":
        return cls

    class Fitted(cls):
        def step(self, closure: Any = None) -> Any:
            """torchao compiles its update for every shape it meets, which takes seconds each on a CPU: there only if
            the run compiles its model too."""
            on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
            as_written = on_cpu and not compiles
            with torch.compiler.set_stance("force_eager") if as_written else nullcontext():
                return super().step(closure)

        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
            """Each rank decides by the size of its own shard whether to quantise it. With uneven shards the decisions
            may differ, and such a moment could not be gathered: it then stays whole on all of them."""
            sizes = shard_sizes(p)
            if len(set(sizes)) > 1 and not (min(sizes) >= LEAST and fill_blocks(sizes, self.block_size)):
                return torch.zeros_like(p)
            moment: Tensor = super()._new_buffer(p, signed)
            return moment

        @staticmethod
        def _subclass_zeros(p: Tensor, signed: bool, block_size: int) -> Any:
            """Declares the tensor as fp32, which it stands for: of 16-bit shards torch would take two different
            views."""
            return cls._subclass_zeros(p, signed, block_size).float()

    Fitted.__name__, Fitted.__module__ = cls.__name__, cls.__module__
    return Fitted


def fill_blocks(sizes: Sequence[int], block: int) -> bool:
    return all(size % block == 0 for size in sizes)


def shard_sizes(parameter: Tensor) -> list[int]:
    """Returns how many of a parameter's numbers each rank holds, sharded along its first dimension as in FSDP."""
    if not isinstance(parameter, DTensor):
        return [parameter.numel()]
    (axis,) = [i for i, placement in enumerate(parameter.placements) if placement.is_shard()]
    world = parameter.device_mesh.size(axis)
    shards = torch.empty(parameter.shape, device="meta").chunk(world)
    return [shard.numel() for shard in shards] + [0] * (world - len(shards))


def check_whole(cls: type[torch.optim.Optimizer], parameters: Sequence[Tensor]) -> None:
    """Raises UserError if bitsandbytes, whose kernels support plain tensors only, gets shards."""
    if _package(cls) == "bitsandbytes" and any(isinstance(p, DTensor) for p in parameters):
        why = f"{cls.__name__} of bitsandbytes updates whole tensors, and this engine shards them"
        raise problem("optimizer.name", why, "give adamw8bit (torchao), or take engine=ddp")


def page_again(optimizer: Any) -> None:
    """Moves loaded codes back to pages that may leave the GPU: bitsandbytes' paged optimizers load them into plain
    memory."""
    if not getattr(optimizer, "is_paged", False):
        return
    for parameter, state in optimizer.state.items():
        for key in ("state1", "state2"):
            if key in state:
                pages = optimizer.get_state_buffer(parameter, dtype=state[key].dtype)
                state[key] = pages.copy_(state[key])


def check_pieces(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    """Makes the first step raise UserError if an engine has replaced the parameters by other tensors.

    DeepSpeed's partitions hold pieces of many parameters; their codes and scales belong to none, and could not be saved
    by name.
    """
    known = {id(parameter) for parameter in parameters}

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            why = "this engine updates flat pieces of many parameters, whose quantised state no checkpoint could name"
            raise problem("optimizer.name", why, "give adamw, or take engine=ddp or fsdp")

    optimizer.register_step_pre_hook(check)
