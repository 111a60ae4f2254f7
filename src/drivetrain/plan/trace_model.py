"""Builds a workload's model without numbers: on PyTorch's meta device, its tensors replaced by fake ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from drivetrain.memory.recompute import repeated_blocks
from drivetrain.workloads.base import Workload


@contextmanager
def built_fake(workload: Workload, mode: FakeTensorMode, blocks: int | None = None) -> Iterator[None]:
    """While the block runs, the workload's models have parameters and buffers of `mode`.

    blocks: of those that repeat, how many are kept; None: all.
    """
    build, build_beside = workload.build_model, workload.build_auxiliary

    def beside(name: str) -> nn.Module:
        with unset_fake_temporarily(), torch.device("meta"):
            model = build_beside(name)
        is_empty = all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        return filled(model, mode) if is_empty else build_beside(name)  # a user's own may have numbers

    def built() -> nn.Module:
        with unset_fake_temporarily(), torch.device("meta"):
            model = build()
        if blocks is not None:
            container = container_of_alike(model)
            assert container is not None, "only a model whose blocks are alike is traced with fewer"
            del container[blocks:]
        return filled(model, mode)

    workload.build_model = built  # type: ignore[method-assign]
    workload.build_auxiliary = beside  # type: ignore[method-assign]
    try:
        with _assigned():
            yield
    finally:
        del workload.build_model, workload.build_auxiliary


def alike_blocks(workload: Workload) -> int:
    """Returns how many blocks the model has that are alike and follow one another; 0 where it has none, or others
    too."""
    with torch.device("meta"):
        container = container_of_alike(workload.build_model())
    return 0 if container is None else len(container)


def container_of_alike(model: nn.Module) -> nn.ModuleList | nn.Sequential | None:
    """Returns what holds all blocks of the model, if they are alike: of the same layers, sizes and types, and trained
    or not trained alike."""
    wanted = {id(block) for block in repeated_blocks(model)}
    for container in model.modules():
        children = [*container.children()]
        if wanted and wanted == {id(child) for child in children}:
            are_alike = len({_description(child) for child in children}) == 1
            is_list = isinstance(container, nn.ModuleList | nn.Sequential)
            return container if are_alike and is_list else None  # type: ignore[return-value]
    return None


def _description(block: nn.Module) -> tuple[Any, ...]:
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    held = (*block.named_parameters(), *block.named_buffers())
    return modules, tuple((name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in held)


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
    new = torch.empty_like(tensor, device=torch.device("cpu"))  # a text would name the host
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
