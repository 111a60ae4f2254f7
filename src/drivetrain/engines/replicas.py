"""Replicas of a model in one process: nn.DataParallel's steps (scatter, replicate, apply in parallel, gather).

On GPUs PyTorch's own functions do it. On a CPU, where nn.DataParallel passes its input straight through, replicas run
on threads: each holds its own copies of the weights, made by an operation that autograd sums gradients through, as the
broadcast to several GPUs is. That serves to test the semantics; it saves neither time nor memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode


class GpuReplicas(nn.DataParallel):
    """nn.DataParallel, except that for inference the replicas are made once."""

    _kept: list[nn.Module] | None = None

    @property
    def num_replicas(self) -> int:
        return len(self.device_ids)

    def forget(self) -> None:
        """Drops the replicas, since the weights change: the next inference makes new ones."""
        self._kept = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or len(self.device_ids) == 1:
            return super().forward(*args, **kwargs)
        if self._kept is None:
            self._kept = nn.parallel.replicate(self.module, self.device_ids, detach=True)
        pieces, named = self.scatter(args, kwargs, self.device_ids)
        outputs = nn.parallel.parallel_apply(self._kept[: len(pieces)], pieces, named, self.device_ids[: len(pieces)])
        return self.gather(outputs, self.output_device)


class ThreadReplicas(nn.Module):
    """`module` on `replicas` threads of the CPU, with the interface of GpuReplicas."""

    def __init__(self, module: nn.Module, replicas: int, at_once: int | None = None) -> None:
        """at_once: threads; left out, one a replica."""
        super().__init__()
        self.module = module
        self.num_replicas = replicas
        self._threads = ThreadPoolExecutor(at_once or replicas, thread_name_prefix="replica")
        self._kept: list[nn.Module] | None = None

    def forget(self) -> None:
        self._kept = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        pieces = scatter((args, kwargs), self.num_replicas)
        if len(pieces) == 1:
            return self.module(*args, **kwargs)
        return gather(self._in_parallel(self._replicas()[: len(pieces)], pieces))

    def _replicas(self) -> list[nn.Module]:
        if torch.is_grad_enabled():
            return replicate(self.module, self.num_replicas)
        if self._kept is None:
            self._kept = replicate(self.module, self.num_replicas)
        return self._kept

    def _in_parallel(self, replicas: list[nn.Module], pieces: list[Any]) -> list[Any]:
        grad, cast_on = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        cast_to = torch.get_autocast_dtype("cpu")
        meters = _get_current_dispatch_mode_stack()

        def run(replica: nn.Module, piece: Any) -> Any:
            # these settings belong to the thread that made them
            with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=cast_to, enabled=cast_on), _seen_by(meters):
                args, kwargs = piece
                return replica(*args, **kwargs)

        return list(self._threads.map(run, replicas, pieces))


@contextmanager
def _seen_by(modes: list[TorchDispatchMode]) -> Iterator[None]:
    """Makes observers of another thread's operators (memory, FLOPs) observe this one's too."""
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


def scatter(value: Any, parts: int) -> list[Any]:
    """Divides a nest of tensors into at most `parts` nests: tensors are cut along their first dimension, the rest is in
    each."""
    sizes = {tensor.shape[0] for tensor in _tensors(value)}
    if not sizes:
        return [value]
    longest = max(sizes)
    count = len(torch.empty(longest).chunk(parts))
    return [_mapped(value, _Piece(number, parts)) for number in range(count)]


@dataclass(frozen=True)
class _Piece:
    number: int
    parts: int

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(self.parts)[self.number]


def gather(outputs: list[Any]) -> Any:
    """Reverses `scatter` for models' outputs: tensors, sequences, mappings (as transformers' outputs), None."""
    first = outputs[0]
    if isinstance(first, Tensor):
        whole = [output[None] if output.dim() == 0 else output for output in outputs]
        return torch.cat(whole)
    if isinstance(first, Mapping):
        make = cast(Callable[..., Any], type(first))
        return make(**{key: gather([output[key] for output in outputs]) for key in first})
    if isinstance(first, tuple | list):
        return type(first)(gather(list(parts)) for parts in zip(*outputs, strict=True))
    return first


def replicate(module: nn.Module, count: int) -> list[nn.Module]:
    """Makes copies whose weights are results of `clone`, so that their gradients are summed in the module's own.

    The first copy keeps the module's buffers, the others have copies that are lost: as under nn.DataParallel.
    """
    return [_replica(module, first=number == 0) for number in range(count)]


def _replica(module: nn.Module, first: bool) -> nn.Module:
    weights = {id(p): p.clone() for p in module.parameters()}  # one clone for tied ones
    copies = {id(part): part._replicate_for_data_parallel() for part in module.modules()}
    for part in module.modules():
        copy = copies[id(part)]
        for name, child in part._modules.items():
            copy._modules[name] = None if child is None else copies[id(child)]
        for name, parameter in part._parameters.items():
            # a plain tensor in the parameter's place: autograd goes on to the parameter
            setattr(copy, name, None if parameter is None else weights[id(parameter)])
        for name, buffer in part._buffers.items():
            copy._buffers[name] = buffer if first or buffer is None else buffer.clone()
    return copies[id(module)]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.dim() else []
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value) if value.dim() else value
    if isinstance(value, Mapping):
        return {key: _mapped(part, change) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_mapped(part, change) for part in value)
    return value
