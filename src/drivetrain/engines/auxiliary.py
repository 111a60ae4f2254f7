"""The models beside the trained one: built with it, wrapped by the same engine, in checkpoints with it.

Frozen and moved ones are models of their own, which run without gradient. Trained ones become a part of the model, so
that sharding, summing of gradients, updating and saving see one model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.config.precision import PRECISIONS
from drivetrain.engines.state import local_part
from drivetrain.errors import problem
from drivetrain.models.adapters import KEPT
from drivetrain.numerics.torch_precision import dtype as torch_dtype
from drivetrain.workloads.base import Workload
from drivetrain.workloads.loss_contract import Auxiliary

FIELD = "workload.auxiliary"
ATTACHED = "drivetrain_auxiliary"  # the model's part that holds trained auxiliary models; in names of weights
SAMPLED = 256  # numbers of each tensor in a fingerprint
NEAR = 1e-4  # of their size, by which the same weights may differ: some are computed, in an order of the machine's


class _Chain(nn.Sequential):
    """An nn.Sequential that has trained auxiliary models as a part, and does not run it as its last step."""

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([module for name, module in self._modules.items() if name != ATTACHED and module is not None])


def attach(model: nn.Module, heads: Mapping[str, nn.Module]) -> None:
    """Makes trained auxiliary models a part of the model, in place."""
    if type(model) is nn.Sequential:
        model.__class__ = _Chain
    model.add_module(ATTACHED, nn.ModuleDict(heads))
    names: frozenset[str] | None = getattr(model, KEPT, None)
    if names is not None:  # of a frozen base with adapters, checkpoints keep what is trained
        own = {name for name in model.state_dict() if name.startswith(f"{ATTACHED}.")}
        setattr(model, KEPT, frozenset(names | own))


def attached(model: nn.Module) -> dict[str, nn.Module]:
    """The trained auxiliary models that are a part of the model, by name."""
    found = model._modules.get(ATTACHED)
    return dict(found.named_children()) if isinstance(found, nn.ModuleDict) else {}


def without_attached(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights of a checkpoint without those of trained auxiliary models: the weights of the model when it
    stands alone."""
    return {name: weight for name, weight in weights.items() if not name.startswith(f"{ATTACHED}.")}


@dataclass
class Companion:
    """A frozen or moved model. forward: the wrapped module that runs it."""

    settings: Auxiliary
    model: nn.Module
    forward: Callable[..., Any]
    fingerprint: list[float] | None  # None: this rank does not have the weights

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.settings.precision is None:
            return self.forward(*args, **kwargs)
        device = next(self.model.parameters()).device.type
        with torch.autocast(device, enabled=False):  # of the trained model: this one computes in what it is kept in
            return self.forward(*args, **kwargs)


class AuxiliaryModels:
    """All models beside one trained model. `callables`: by name, for the loss."""

    def __init__(self, workload: Workload, model: nn.Module, dtype: torch.dtype) -> None:
        """model: the trained one as it was built, on the CPU; trained auxiliary models are attached to it."""
        self.steps = 0  # optimizer steps so far
        self.companions: dict[str, Companion] = {}
        heads = {}
        for name, each in workload.auxiliary.items():
            kept = dtype if each.precision is None else torch_dtype(PRECISIONS[each.precision].parameters)
            made = copy.deepcopy(model) if each.build is None else workload.build_auxiliary(name).to(kept)
            if each.role == "trained":
                heads[name] = made
                continue
            made.requires_grad_(False).eval()
            _check_follows(name, each, made, model)
            mark = fingerprint(made) if each.role == "frozen" else None
            self.companions[name] = Companion(each, made, made, mark)
        if heads:
            attach(model, heads)
        self._model = model

    @property
    def callables(self) -> dict[str, Callable[..., Any]]:
        return {**self.companions, **attached(self._model)}

    @property
    def moved(self) -> dict[str, Companion]:
        return {name: each for name, each in self.companions.items() if each.settings.role == "moved"}

    def due(self) -> list[Companion]:
        """Counts an optimizer step; returns the models that are synchronised after it."""
        self.steps += 1
        return [each for each in self.moved.values() if self.steps % each.settings.every == 0]

    def tensors(self) -> list[Tensor]:
        return [
            tensor for each in self.companions.values() for tensor in (*each.model.parameters(), *each.model.buffers())
        ]

    def summary(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps beside the weights of moved models; empty where there are none."""
        if not self.companions:
            return {}
        frozen = {
            name: {"source": each.settings.source, "fingerprint": each.fingerprint}
            for name, each in self.companions.items()
            if each.settings.role == "frozen"
        }
        return {"steps": self.steps, "frozen": frozen}

    def check_frozen(self, saved: Mapping[str, Any]) -> None:
        """Raises UserError if a frozen model differs from the one that the checkpoint was trained beside."""
        for name, each in self.companions.items():
            before = saved.get(name)
            if each.settings.role != "frozen" or before is None:
                continue
            if before["source"] != each.settings.source:
                why = f"{name} was {before['source']} when the checkpoint was made, and is {each.settings.source} now"
            elif not _alike(before["fingerprint"], each.fingerprint):
                why = f"{name} ({each.settings.source}) has other weights than when the checkpoint was made"
            else:
                continue
            raise problem("--resume", why, "give the same auxiliary model, or start anew with --overwrite")


def _check_follows(name: str, settings: Auxiliary, made: nn.Module, model: nn.Module) -> None:
    """Raises UserError if a moved model cannot follow the trained one."""
    if settings.role != "moved":
        return
    own = {key: parameter.shape for key, parameter in made.named_parameters()}
    trained = [(key, parameter.shape) for key, parameter in model.named_parameters() if parameter.requires_grad]
    lacking = [key for key, shape in trained if own.get(key) != shape]
    if lacking:
        why = f"{name} is to follow the model, and has no {', '.join(lacking[:3])} of the same shape"
        raise problem(FIELD, why, "leave its model out, which copies the trained one, or make it of the same class")


@torch.no_grad()
def follow(companion: Companion, model: nn.Module) -> None:
    """Mixes the model's trained weights and its floating buffers into a moved model that is sharded alike."""
    mixing, own = companion.settings.mixing, dict(companion.model.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name in own:
            mine = local_part(own[name])
            mine.lerp_(local_part(parameter.detach()).to(mine.dtype), mixing)
    buffers = dict(model.named_buffers())
    for name, buffer in companion.model.named_buffers():
        if buffer.is_floating_point() and name in buffers:
            local_part(buffer).lerp_(local_part(buffers[name]).to(buffer.dtype), mixing)


@torch.no_grad()
def fingerprint(model: nn.Module) -> list[float] | None:
    """Returns two sums over some numbers of each weight: of their sizes, and of their products with a fixed wave."""
    size = wave = 0.0
    for tensor in model.state_dict().values():
        if tensor.is_meta:
            return None
        flat = tensor.detach().flatten()
        some = flat[:: max(1, math.ceil(flat.numel() / SAMPLED))].double().cpu()
        size += float(some.abs().sum())
        wave += float(some @ torch.arange(len(some), dtype=torch.float64).cos_())
    return [size, wave]


def _alike(before: list[float] | None, now: list[float] | None) -> bool:
    if before is None or now is None:
        return True
    return all(abs(one - other) <= NEAR * max(before[0], 1e-30) for one, other in zip(before, now, strict=True))
