"""Copies of linear layers' weights in the order in which a CPU's kernels read them.

A step of few rows reads every weight for few products. PyTorch's kernels take a weight as it lies and bring it into
their own order in each step; oneDNN's can have that done once, for any number of rows (what torch.compile's Inductor
calls prepacking). On an AMD EPYC the products of a step of 1 to 16 rows took a half to a third of the time, of 64 rows
a half, and of a prompt three quarters (bench/prepacked.py). The order costs a copy of the weights, so only as many are
copied as a share of the free memory holds.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.errors import last_line
from drivetrain.memory.limit import attainable_memory

LOG = logging.getLogger(__name__)
SHARE = 0.25  # of the memory that is free, which the copies may take
LEAST = 2**16  # numbers of a weight: smaller ones stay in a core's cache as they are
ROWS = 64  # that the order is chosen for; others are about as quick with it
DTYPES = (torch.float32, torch.bfloat16)
Key = tuple[int, tuple[int, ...]]  # address and strides of a weight


@contextmanager
def prepacked(model: nn.Module) -> Iterator[None]:
    """While the block runs, the model's linear layers multiply by prepacked copies of their weights."""
    undo = prepack(model)
    try:
        yield
    finally:
        undo()


def prepack(model: nn.Module) -> Callable[[], None]:
    """Lets the model's linear layers multiply by prepacked copies of their weights where no gradient is wanted, as far
    as they lie in this process' memory whole. A layer whose weight has changed since goes on without its copy. Returns
    a function that undoes it."""
    free, done = SHARE * attainable_memory(), list[nn.Module]()
    copies: dict[Key, Tensor] = {}  # a tied weight is copied once
    for layer in model.modules():
        weight = _weight_of(layer)
        if weight is None or "forward" in vars(layer):
            continue
        dtype = _dtype_of_products(weight)
        needed = 0 if _key(weight) in copies else weight.numel() * dtype.itemsize
        if needed > free:
            continue
        try:
            taken = _Prepacked(layer, weight, dtype, copies)
        except (RuntimeError, AttributeError, NotImplementedError) as error:  # a build of PyTorch without oneDNN
            LOG.info("weights are not prepacked: %s", last_line(error))
            break
        layer.forward = taken
        free -= needed
        done.append(layer)

    def undo() -> None:
        for layer in done:
            vars(layer).pop("forward", None)

    return undo


def _weight_of(layer: nn.Module) -> Tensor | None:
    """Returns the weight of a linear layer as (outputs, inputs), where it is a plain tensor of this process; None of
    other layers, of shards, of quantised weights and of tensors without numbers."""
    is_plain = type(layer) is nn.Linear
    weight: Any = layer.weight if is_plain or _is_transposed(layer) else None
    if type(weight) not in (nn.Parameter, Tensor) or weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return None
    if weight.layout is not torch.strided or weight.dim() != 2 or weight.numel() < LEAST:
        return None
    return weight.detach() if is_plain else weight.detach().t()


def _is_transposed(layer: nn.Module) -> bool:
    """Returns whether it is Transformers' linear layer of GPT-2, whose weight is (inputs, outputs)."""
    module = sys.modules.get("transformers.pytorch_utils")  # not imported for it: a model that has one did
    return module is not None and type(layer) is module.Conv1D


def _key(weight: Tensor) -> Key:
    return weight.data_ptr(), weight.stride()


def _dtype_of_products(weight: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype


class _Prepacked:
    """The forward pass of one layer."""

    def __init__(self, layer: nn.Module, weight: Tensor, dtype: torch.dtype, copies: dict[Key, Tensor]) -> None:
        """weight: (outputs, inputs). dtype: of the products. copies: of other layers, to which this one's is added."""
        self._plain = layer.forward
        self._layer, self._dtype = layer, dtype
        self._known = _identity(layer)
        key = _key(weight)
        if key not in copies:
            with torch.no_grad():
                copies[key] = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), ROWS)
        self._weight = copies[key]
        bias: Tensor | None = layer.bias  # type: ignore[assignment]
        self._bias = None if bias is None else bias.detach().to(dtype)

    def __call__(self, input: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else input.dtype
        is_other = dtype != self._dtype or not input.is_floating_point() or _identity(self._layer) != self._known
        if is_other or torch.is_grad_enabled() or not input.numel():
            found: Tensor = self._plain(input)
            return found
        return torch.ops.mkldnn._linear_pointwise(input.to(dtype), self._weight, self._bias, "none", [], "")


def _identity(layer: Any) -> tuple[int, ...]:
    """Returns what changes with the layer's weight or bias."""
    weight, bias = layer.weight, layer.bias
    of_bias = () if bias is None else (bias.data_ptr(), bias._version)
    return weight.data_ptr(), weight._version, *of_bias
