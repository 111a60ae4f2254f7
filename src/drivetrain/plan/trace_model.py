"""Builds a workload's model without numbers: on PyTorch's meta device, its tensors replaced by fake ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from drivetrain.workloads.base import Workload


@contextmanager
def built_fake(workload: Workload, mode: FakeTensorMode) -> Iterator[None]:
    """While the block runs, the workload's models have parameters and buffers of `mode`."""
    build = workload.build_model

    def built() -> nn.Module:
        with unset_fake_temporarily(), torch.device("meta"):
            model = build()
        return filled(model, mode)

    workload.build_model = built  # type: ignore[method-assign]
    try:
        with _assigned():
            yield
    finally:
        del workload.build_model


def filled(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Replaces all tensors of the model in place; those that modules share stay shared."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # the old one too: its id must not be used again

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _like(tensor), tensor
        return made[id(tensor)][0]

    with mode:
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                slots: dict[str, Any] = held
                slots.update({name: fake(tensor) for name, tensor in held.items() if tensor is not None})
    return model


def _like(tensor: Tensor) -> Tensor:
    new = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        new.__dict__.update(tensor.__dict__)
    return new


@contextmanager
def _assigned() -> Iterator[None]:
    """Lets `nn.Module.to` give a fake parameter its new dtype: it swaps the two tensors, which fails where anything
    refers to one weakly, as a FakeTensorMode does to all."""
    swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors

    def assign(held: Tensor, new: Tensor) -> None:
        held.data = new.data

    torch.utils.swap_tensors = assign
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap
