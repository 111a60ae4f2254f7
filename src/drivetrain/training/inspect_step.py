"""Inspects one step: the output of every module, and the place where numbers stop being finite.

The modules are those that the workload's loss calls; hooks are put on them at the first call and removed afterwards. A
gradient is inspected where it arrives at a module's output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.data.loader import MicroBatch
from drivetrain.engines.base import Engine
from drivetrain.engines.state import local_part
from drivetrain.workloads.base import Batch, Workload
from drivetrain.workloads.loss_contract import LossContext

WRAPPERS = "module."  # of DDP; DeepSpeed's too


@dataclass
class Layer:
    """A module's output over all its calls: the largest finite magnitude, and how many numbers were not finite."""

    name: str
    kind: str
    order: int  # in which it was first done with its forward
    largest: float = 0.0
    not_finite: int = 0
    numbers: int = 0
    largest_gradient: float = 0.0
    not_finite_gradients: int = 0


@dataclass
class Culprit:
    """The first place at which a number is not finite."""

    where: str  # module
    kind: str
    what: str  # weight, output, gradient
    order: int

    def __str__(self) -> str:
        called = f"{self.where} ({self.kind})"
        return {
            "weight": f"weights of {called} are not finite before the step",
            "output": f"the first output that is not finite is of {called}",
            "gradient": f"all outputs are finite; the first gradient that is not arrives at the output of {called}",
        }[self.what]


@dataclass
class Inspection:
    losses: list[float] = field(default_factory=list)  # mean of each micro-batch
    layers: dict[str, Layer] = field(default_factory=dict)
    weight: Culprit | None = None
    output: Culprit | None = None
    gradient: Culprit | None = None
    micro_batch: int | None = None  # the first in which something is not finite, from 0

    @property
    def culprit(self) -> Culprit | None:
        return self.weight or self.output or self.gradient


def first_of(found: Sequence[Culprit | None]) -> Culprit | None:
    """Returns the first of all ranks' findings: in the forward pass, else in the backward pass."""
    kinds = ("weight", "output", "gradient")
    there = [each for each in found if each is not None]
    return min(there, key=lambda each: (kinds.index(each.what), each.order), default=None)


def inspected(engine: Engine, workload: Workload, micro_batches: Sequence[MicroBatch]) -> tuple[Inspection, Tensor]:
    """Runs the window again, forward and backward, with this rank's share of the loss. It leaves the gradients; all
    ranks must call it."""
    with inspecting(workload) as found:
        share = engine.forward_backward(micro_batches)
    return found, share


@contextmanager
def inspecting(workload: Workload) -> Iterator[Inspection]:
    """While the block runs, inspects the modules that the workload's loss calls; yields what is found."""
    looking = _Looking(workload)
    with looking.at_losses():
        yield looking.found


class _Looking:
    def __init__(self, workload: Workload) -> None:
        self._workload, self.found = workload, Inspection()
        self._handles: list[RemovableHandle] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._gradients = 0

    @contextmanager
    def at_losses(self) -> Iterator[None]:
        """While the block runs, replaces the workload's loss_sums by this object's."""
        whole, weights = self._workload.loss_sums, self._workload.terms

        def loss_sums(model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
            if not self._handles:
                self._put_hooks(model)
            sums, counts = whole(model, batch, context), self._workload.counts(batch)
            means = [float(local_part(sums[name].detach())) / max(1, counts[name]) * weights[name] for name in weights]
            self.found.losses.append(sum(means))
            if not math.isfinite(sum(means)) and self.found.micro_batch is None:
                self.found.micro_batch = len(self.found.losses) - 1
            return sums

        vars(self._workload)["loss_sums"] = loss_sums
        try:
            yield
        finally:
            del vars(self._workload)["loss_sums"]
            for handle in self._handles:
                handle.remove()
            for buffer, before in self._buffers:  # BatchNorm's statistics, which one NaN spoils
                buffer.copy_(before)

    def _put_hooks(self, model: nn.Module) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        for name, module in model.named_modules():
            label = name.removeprefix(WRAPPERS) or "the model"
            self._look_at_weights(label, module)
            self._handles.append(module.register_forward_hook(self._hook(label, type(module).__name__)))

    def _look_at_weights(self, name: str, module: nn.Module) -> None:
        own = [local_part(p.detach()) for p in module.parameters(recurse=False)]
        plain = [p for p in own if type(p) is Tensor and p.is_floating_point()]  # a quantised one's codes are not
        bad = any(not bool(p.isfinite().all()) for p in plain)
        if bad and self.found.weight is None:
            self.found.weight = Culprit(name, type(module).__name__, "weight", 0)

    def _hook(self, name: str, kind: str) -> Any:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            layer = self.found.layers.setdefault(name, Layer(name, kind, len(self.found.layers)))
            for tensor in floating(output):
                largest, bad = measured(tensor.detach())
                layer.largest = max(layer.largest, largest)
                layer.not_finite += bad
                layer.numbers += tensor.numel()
                if bad and self.found.output is None:
                    self.found.output = Culprit(name, kind, "output", layer.order)
                    self.found.micro_batch = len(self.found.losses)
                if tensor.requires_grad:
                    self._handles.append(tensor.register_hook(self._gradient_hook(layer)))

        return look

    def _gradient_hook(self, layer: Layer) -> Any:
        def look(gradient: Tensor) -> None:
            largest, bad = measured(gradient.detach())
            layer.largest_gradient = max(layer.largest_gradient, largest)
            layer.not_finite_gradients += bad
            self._gradients += 1
            if bad and self.found.gradient is None:
                self.found.gradient = Culprit(layer.name, layer.kind, "gradient", self._gradients)
                if self.found.micro_batch is None:
                    self.found.micro_batch = max(0, len(self.found.losses) - 1)

        return look


def floating(value: Any) -> Iterator[Tensor]:
    """Yields the floating tensors in a module's output."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from floating(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from floating(each)


def measured(tensor: Tensor) -> tuple[float, int]:
    """Returns the largest finite magnitude, and how many numbers are not finite."""
    own = local_part(tensor)
    if not own.numel():
        return 0.0, 0
    finite = own.isfinite()
    largest = torch.where(finite, own, torch.zeros_like(own)).abs().amax()
    return float(largest), int(own.numel() - finite.sum())
