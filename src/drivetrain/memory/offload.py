"""Activations kept in CPU memory: what a model's blocks save for the backward pass leaves the device until it is used.

PyTorch asks a pair of hooks (torch.autograd.graph.saved_tensors_hooks) for each tensor that autograd saves: within a
block's forward pass it is copied to pinned CPU memory, and back when the backward pass reaches it, on the same stream
as the computation, so that nobody waits for anything else (torch's own save_on_cpu, which knows no exceptions). The
device then holds the activations of one block, whatever their number. With recompute they are each block's input.

What stays where it is: parameters and buffers, what is a view of them, tensors that all blocks are given alike (masks,
rotary factors), and small ones. What several operators save, as the layers of an attention do their one input, is
moved once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from drivetrain.errors import problem

LEAST_BYTES = 2**16  # a copy of fewer takes as long to begin as to do
# what was moved in one call of a block; a weak reference to its storage keeps another from taking its name
Known = dict[Any, tuple[StorageWeakRef, Tensor]]


class Offload:
    def __init__(self) -> None:
        self.moved_bytes = 0  # to CPU memory, since the start

    def around(self, block: nn.Module) -> None:
        """In place; outside of what recomputes it and, as compiled code cannot be seen into, of what it was compiled
        to."""
        name = "forward" if block._compiled_call_impl is None else "_compiled_call_impl"
        setattr(block, name, functools.partial(self._call, block, getattr(block, name)))

    def _call(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        alike = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor)]
        stay = {_storage(tensor) for tensor in (*block.parameters(), *block.buffers(), *alike)}
        known: Known = {}
        try:
            with saved_tensors_hooks(functools.partial(self._pack, stay, known), _unpack):
                return forward(*args, **kwargs)
        finally:
            known.clear()  # autograd keeps the hooks as long as what they made

    def _pack(self, stay: set[int | None], known: Known, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):
            return tensor
        stays = isinstance(tensor._base, nn.Parameter)
        local, storage = _local(tensor), _storage(tensor)
        is_spread = storage is not None and local.untyped_storage().nbytes() < local.nbytes  # one number for many
        if stays or storage is None or storage in stay or is_spread or local.nbytes < LEAST_BYTES:
            return tensor.detach()  # an output that its own node holds would never be freed
        key = storage, local.storage_offset(), local.shape, local.stride(), local.dtype, local._version
        if key not in known:
            known[key] = StorageWeakRef(local.untyped_storage()), self._moved(local)
        split = _Split.of(tensor) if isinstance(tensor, DTensor) else None
        return _Away(known[key][1], local.device, split)

    def _moved(self, tensor: Tensor) -> Tensor:
        """Laid out as it was: kernels of the backward pass may ask for that."""
        pins = tensor.is_cuda
        held = torch.empty_like(tensor, device="cpu", pin_memory=pins)
        self.moved_bytes += held.nbytes
        return held.copy_(tensor, non_blocking=pins)


def offload_activations(model: nn.Module, blocks: Sequence[nn.Module]) -> Offload:
    """Around the model's repeated blocks, in place. UserError if there are none."""
    if not blocks:
        why = f"{type(model).__name__} has no repeated blocks in a ModuleList or Sequential"
        raise problem("offload_activations", why, "leave it out")
    made = Offload()
    for block in blocks:
        made.around(block)
    return made


@dataclass(frozen=True)
class _Split:
    """How ranks share a tensor of which this one's part was moved."""

    mesh: DeviceMesh
    placements: Sequence[Placement]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> _Split:
        return cls(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def joined(self, local: Tensor) -> Tensor:
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


@dataclass(frozen=True)
class _Away:
    held: Tensor
    device: torch.device
    split: _Split | None

    def back(self) -> Tensor:
        local = self.held.to(self.device, non_blocking=True)
        return local if self.split is None else self.split.joined(local)


def _unpack(kept: Tensor | _Away) -> Tensor:
    return kept.back() if isinstance(kept, _Away) else kept


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storage(tensor: Tensor) -> int | None:
    """Its name among those that live; None of what is no plain tensor (sparse, quantised)."""
    local = _local(tensor)
    plain = type(local) in (Tensor, nn.Parameter) and local.layout == torch.strided
    return local.untyped_storage()._cdata if plain else None
