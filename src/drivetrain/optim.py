"""Optimizers and schedules."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drivetrain import low_bit
from drivetrain.config import training
from drivetrain.errors import problem
from drivetrain.imports import import_object

Maker = Callable[[type[torch.optim.Optimizer], list[dict[str, Any]], dict[str, Any]], torch.optim.Optimizer]


class OptimizerFactory(Protocol):
    def __call__(self, model: nn.Module, make: Maker = ...) -> torch.optim.Optimizer:
        """The optimizer of a model. make: puts class, parameter groups and arguments together."""


def plainly(
    cls: type[torch.optim.Optimizer], groups: list[dict[str, Any]], arguments: dict[str, Any]
) -> torch.optim.Optimizer:
    return cls(groups, **arguments)


OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def optimizer_factory(config: training.Optimizer, compiles: bool = False) -> OptimizerFactory:
    """A function that makes the optimizer of a model, called by the engine after wrapping.

    compiles: whether an update that can be compiled on a CPU is.
    """
    cls = OPTIMIZERS.get(config.name) or _imported(config.name)
    arguments = _arguments(config, cls)

    def build(model: nn.Module, make: Maker = plainly) -> torch.optim.Optimizer:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        parameters = [p for _, p in named]
        low_bit.check_whole(cls, parameters)
        fused = {"fused": True} if _fuses(config, parameters) else {}
        try:
            optimizer = make(
                low_bit.fitted(cls, compiles), list(_groups(named, config.weight_decay)), {**fused, **arguments}
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise problem("optimizer", f"{cls.__name__} refuses its arguments: {error}", "correct options") from error
        if cls is torch.optim.SGD:
            _start_momentum(getattr(optimizer, "optim", optimizer))  # ZeroRedundancyOptimizer keeps one within
        if low_bit.is_low_bit(cls):
            low_bit.check_pieces(optimizer, parameters)
        return optimizer

    return build


def _fuses(config: training.Optimizer, parameters: list[nn.Parameter]) -> bool:
    """Whether one kernel may update all parameters. A user's optimizer, or one with such options, decides itself.

    On a CPU only in fp32: torch 2.13's fused SGD leaves 16-bit parameters as they are (its vector path
    writes nothing back), which looks like a model that does not learn. tests/test_optim.py watches for the cure.
    """
    ours = config.name in OPTIMIZERS and not config.options.keys() & {"foreach", "differentiable", "dampening"}
    if config.name == "sgd" and any(isinstance(p, DTensor) for p in parameters):
        return False  # torch 2.13 has no fused SGD over sharded parameters
    return ours and all(p.device.type == "cuda" or p.dtype == torch.float32 for p in parameters)


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Let fused SGD start from zero momentum, which gives the same updates.

    torch 2.13 starts it from uninitialised memory instead: that stays if the first step overflows and is skipped, and
    a parameter that gets its first gradient later than its group is refused.
    """
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"]:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _imported(name: str) -> type[torch.optim.Optimizer]:
    if name in low_bit.SHORT:
        low_bit.check_installed(name)
    elif "." not in name and ":" not in name:
        known = ", ".join([*OPTIMIZERS, *low_bit.SHORT])
        raise problem("optimizer.name", f"{name} was given", f"known: {known}; others as package.module:Class")
    cls = import_object(low_bit.SHORT.get(name, name), "optimizer.name")
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise problem("optimizer.name", f"{name} is no torch.optim.Optimizer", "name an optimizer class")
    return cls


def _arguments(config: training.Optimizer, cls: type[torch.optim.Optimizer]) -> dict[str, Any]:
    accepted = inspect.signature(cls).parameters
    arguments: dict[str, Any] = {"lr": config.lr}
    if cls is torch.optim.SGD:
        arguments["momentum"] = config.momentum
    elif config.name in OPTIMIZERS or config.name in low_bit.SHORT:
        arguments |= {"betas": config.betas, "eps": config.eps}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    if config.weight_decay and "weight_decay" not in accepted and not takes_any:
        raise problem("optimizer.weight_decay", f"{cls.__name__} has no weight decay", "leave it out")
    for key in config.options:
        if key in arguments or key == "weight_decay":
            raise problem(
                f"optimizer.options.{key}", "the run file has a field of its own for it", f"give optimizer.{key}"
            )
        if key not in accepted and not takes_any:
            known = ", ".join(name for name in accepted if name not in {"params", "self"})
            raise problem(f"optimizer.options.{key}", f"{cls.__name__} has no such argument", f"it takes: {known}")
    return arguments | config.options


def _groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> Iterable[dict[str, Any]]:
    """Matrices and filters decay; biases, gains and other vectors do not (as in BERT's and GPT's training)."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for _, parameter in named:
        (decayed if parameter.ndim >= 2 else plain).append(parameter)
    if decayed:
        yield {"params": decayed, "weight_decay": weight_decay}
    if plain:
        yield {"params": plain, "weight_decay": 0.0}


def lr_factor(config: training.Schedule, total_steps: int) -> Callable[[int], float]:
    """Updates made so far → factor of the peak learning rate for the next update.

    Warm-up rises linearly from above 0 and reaches 1 after `warmup` updates; then constant, or linear or half a cosine
    down to final_lr_ratio after the last update, so that no update is made at a rate of 0.
    """
    warmup = config.warmup_steps or round(config.warmup_ratio * total_steps)
    floor = config.final_lr_ratio

    def factor(updates: int) -> float:
        if updates < warmup:
            return (updates + 1) / (warmup + 1)
        progress = min(1.0, (updates - warmup) / max(1, total_steps - warmup))
        shape = {
            "constant": 1.0,
            "linear": floor + (1 - floor) * (1 - progress),
            "cosine": floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)),
        }
        return shape[config.name]

    return factor
