"""Keeps activations in CPU memory: tensors that a model's blocks save for the backward pass leave the device until they
are used.

PyTorch asks a pair of hooks (torch.autograd.graph.saved_tensors_hooks) for each tensor that autograd saves: within a
block's forward pass it is copied to pinned CPU memory, and back for the backward pass (torch's own save_on_cpu does
that too, and knows no exceptions). Copies run on a stream of their own beside the computation: a block's activations
leave while the next block computes, and come back while the block after it computes backward. The device then holds the
activations of two blocks, whatever their number. With recompute they are each block's input.

Memory is never given back while a copy uses it, without `record_stream`, which would leave that to the allocator's
timing: a tensor that leaves is held until the stream of the computation waits for its copy; one that comes back lies in
memory of that stream, and its copy waits for the stream's earlier work.

Some tensors stay on the device: parameters and buffers, views of them, tensors that are passed to all blocks alike
(masks, rotary factors), and small ones. A tensor that several operators save, such as the one input of an attention's
layers, is moved once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from drivetrain.errors import problem

LEAST_BYTES = 2**16  # a copy of fewer takes as long to begin as to do
# what was moved in one call of a block; a weak reference to its storage keeps another from taking its name
Known = dict[Any, tuple[StorageWeakRef, int]]


class Copies:
    """Copies between two places in CPU memory, which are done when the call returns."""

    def begin(self, target: Tensor, source: Tensor) -> Any:
        """Begins a copy after the work queued so far. Returns an argument for `wait`; None if the copy is done."""
        target.copy_(source)

    def wait(self, begun: Any) -> None:
        """Makes the computation go on only once the copy is done; the program does not wait."""


class CopiesBeside(Copies):
    """Copies on a stream of their own, beside a GPU's computation."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def begin(self, target: Tensor, source: Tensor) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, begun: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(begun)


class CopiesOfShapes(Copies):
    """Copies of tensors without numbers, for a plan of what a GPU holds while copies run beside its computation."""

    def begin(self, target: Tensor, source: Tensor) -> Any:
        target.copy_(source)
        return source.shape


class Offload:
    def __init__(self, copies: Copies, host: torch.device) -> None:
        """host: where tensors go."""
        self.moved_bytes = 0  # to CPU memory, since the start
        self._copies, self._host = copies, host
        self._leaving: list[tuple[Any, Tensor]] = []  # copies of the block that computes, and what they read
        self._left: list[tuple[Any, Tensor]] = []  # of the block before it
        self._last: Callable[[], _Visit | None] = lambda: None  # weakly: host memory goes with the graph

    def around(self, block: nn.Module, position: int) -> None:
        """Wraps a block, in place; position: its index among the model's blocks. The wrapper goes outside of
        recomputation and of compiled code, which it cannot see into."""
        name = "forward" if block._compiled_call_impl is None else "_compiled_call_impl"
        setattr(block, name, functools.partial(self._call, block, position, getattr(block, name)))

    def _call(self, block: nn.Module, position: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        alike = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor)]
        stay = {_storage(tensor) for tensor in (*block.parameters(), *block.buffers(), *alike)}
        known: Known = {}
        self._release(self._left)
        self._left, self._leaving = self._leaving, []
        before = self._last()
        visit = _Visit(self._copies, position, before if before is not None and before.position < position else None)
        self._last = weakref.ref(visit)
        try:
            with saved_tensors_hooks(functools.partial(self._pack, stay, known, visit), self._unpack):
                return forward(*args, **kwargs)
        finally:
            known.clear()  # autograd keeps the hooks as long as what they made

    def _release(self, copies: list[tuple[Any, Tensor]]) -> None:
        """Releases the memory that these copies read, once they are done."""
        for begun, _ in copies:
            self._copies.wait(begun)
        copies.clear()

    def _unpack(self, kept: Tensor | _Away) -> Tensor:
        self._release(self._left)
        self._release(self._leaving)
        return kept.back() if isinstance(kept, _Away) else kept

    def _pack(self, stay: set[int | None], known: Known, visit: _Visit, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):
            return tensor
        stays = isinstance(tensor._base, nn.Parameter)
        local, storage = _local(tensor), _storage(tensor)
        is_spread = storage is not None and local.untyped_storage().nbytes() < local.nbytes  # one number for many
        if stays or storage is None or storage in stay or is_spread or local.nbytes < LEAST_BYTES:
            return tensor.detach()  # an output that its own node holds would never be freed
        key = storage, local.storage_offset(), local.shape, local.stride(), local.dtype, local._version
        if key not in known:
            known[key] = StorageWeakRef(local.untyped_storage()), visit.keep(self._moved(local), local.device)
        split = _Split.of(tensor) if isinstance(tensor, DTensor) else None
        return _Away(visit, known[key][1], split)

    def _moved(self, tensor: Tensor) -> Tensor:
        """Copies with the same strides: kernels of the backward pass may require them."""
        pins = tensor.is_cuda
        held = torch.empty_like(tensor, device=self._host, pin_memory=pins)
        self.moved_bytes += held.nbytes
        begun = self._copies.begin(held, tensor)
        if begun is not None:
            self._leaving.append((begun, tensor))
        return held


def offload_activations(model: nn.Module, blocks: Sequence[nn.Module], planned: bool = False) -> Offload:
    """Wraps the model's repeated blocks, in place. Raises UserError if there are none.

    planned: the model's tensors have shapes alone and stand for a GPU's. What its host would hold lies on the device
    `meta` then, so that a plan can tell the two apart.
    """
    if not blocks:
        why = f"{type(model).__name__} has no repeated blocks in a ModuleList or Sequential"
        raise problem("offload_activations", why, "leave it out")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    copies = CopiesOfShapes() if planned else CopiesBeside(device) if device.type == "cuda" else Copies()
    made = Offload(copies, torch.device("meta" if planned else "cpu"))
    for position, block in enumerate(blocks):
        made.around(block, position)
    return made


class _Visit:
    """The tensors that one call of a block moved, and the way back."""

    def __init__(self, copies: Copies, position: int, before: _Visit | None) -> None:
        """before: the visit of the block computed before it, which the backward pass reaches next."""
        self.position = position
        self._copies, self._before, self._begun = copies, before, False
        self._held: list[tuple[Tensor, torch.device]] = []
        self._coming: dict[int, tuple[Tensor, Any]] = {}

    def keep(self, held: Tensor, device: torch.device) -> int:
        """Moves a tensor; returns the number by which `back` finds it."""
        self._held.append((held, device))
        return len(self._held) - 1

    def back(self, number: int) -> Tensor:
        """Returns the tensor on the device. The first one brings all the others back, and those of the block before."""
        if not self._begun:
            self._begun = True
            self.fetch()
            if self._before is not None:
                self._before.fetch()
        tensor, begun = self._coming.pop(number) if number in self._coming else self._fetched(number)
        if begun is not None:
            self._copies.wait(begun)
        return tensor

    def fetch(self) -> None:
        if not self._coming:
            self._coming = {number: self._fetched(number) for number in range(len(self._held))}

    def _fetched(self, number: int) -> tuple[Tensor, Any]:
        held, device = self._held[number]
        tensor = torch.empty_like(held, device=device)
        return tensor, self._copies.begin(tensor, held)

    def __del__(self) -> None:
        """After a backward pass that ends early, copies may still write to memory that is freed now."""
        for _, begun in self._coming.values():
            if begun is not None:
                self._copies.wait(begun)


@dataclass(frozen=True)
class _Split:
    """How ranks share a tensor of which this rank's part was moved."""

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
    visit: _Visit
    number: int
    split: _Split | None

    def back(self) -> Tensor:
        local = self.visit.back(self.number)
        return local if self.split is None else self.split.joined(local)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storage(tensor: Tensor) -> int | None:
    """Identifies a tensor's storage among the living ones; None if it is no plain tensor (sparse, quantised)."""
    local = _local(tensor)
    plain = type(local) in (Tensor, nn.Parameter, FakeTensor) and local.layout == torch.strided
    return local.untyped_storage()._cdata if plain else None
