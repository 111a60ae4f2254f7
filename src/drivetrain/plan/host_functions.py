"""Functions of torch as a program with a GPU calls them, for a trace whose tensors of the GPU lie on the CPU.

What the host of a planned GPU holds lies on the device `meta` (as memory/offload.py has it), so that a trace tells the
two apart, and an operator that mixes them fails as it would on a GPU. Engines name the host by a text, "cpu", or by
`Tensor.cpu`; the GPU by a `torch.device`, most often that of another tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode

from drivetrain.models.planned_device import PLANNED_DEVICE

HOST = torch.device("meta")
FSDP_CHECKS = ("_validate_no_meta_params", "_validate_cpu_offload_params")  # that no parameter lies on HOST
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class HostFunctions(TorchFunctionMode):
    """While it is active, what is made on the host or sent there lies on HOST."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func is Tensor.cpu:
            return args[0].to(HOST)
        if func == SET_DATA and args[0].is_meta != args[1].is_meta:
            return _set_data(*args)
        if _is_host(kwargs.get("device")):
            kwargs = {**kwargs, "device": HOST}
        elif func is Tensor.to and len(args) > 1 and _is_host(args[1]):
            args = (args[0], HOST, *args[2:])
        return func(*args, **kwargs)


def _is_host(device: Any) -> bool:
    return isinstance(device, str) and device == "cpu" and device is not PLANNED_DEVICE


def _set_data(held: Any, new: Any) -> None:
    """Gives a tensor the contents of one on another device, as `held.data = new` does between a GPU and a CPU; torch
    takes its meta device for another kind of tensor."""
    torch._C._swap_tensor_impl(held, new.detach().requires_grad_(held.requires_grad))
    held.fake_device = new.device


@contextmanager
def on_host() -> Iterator[None]:
    """While the block runs, tensors lie on HOST as `HostFunctions` has it, and torch's optimizers take them for a
    CPU's."""
    fused = optimizer._get_fused_kernels_supported_devices
    checks = {name: getattr(FSDPParamGroup, name) for name in FSDP_CHECKS}
    optimizer._get_fused_kernels_supported_devices = lambda: [*fused(), HOST.type]
    for name in checks:
        setattr(FSDPParamGroup, name, lambda _: None)
    _fsdp_collectives.torch = _TorchOfHost()  # type: ignore[assignment]
    try:
        with HostFunctions():
            yield
    finally:
        optimizer._get_fused_kernels_supported_devices = fused
        for name, check in checks.items():
            setattr(FSDPParamGroup, name, check)
        _fsdp_collectives.torch = torch


class _TorchOfHost:
    """Torch as FSDP's collectives see it: the only device that they name themselves is the host's, for gradients."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(*_: Any) -> torch.device:
        return HOST
