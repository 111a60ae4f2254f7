"""Builds optimizers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drivetrain.config import training
from drivetrain.config.optimizers import ADAMS, KINDS
from drivetrain.config.packages import remedy
from drivetrain.errors import problem
from drivetrain.optim import low_bit, low_rank
from drivetrain.trust.import_path import import_object

Maker = Callable[[type[torch.optim.Optimizer], list[dict[str, Any]], dict[str, Any]], torch.optim.Optimizer]


class OptimizerFactory(Protocol):
    def __call__(self, model: nn.Module, make: Maker = ...) -> torch.optim.Optimizer:
        """Returns the optimizer of a model. make: puts class, parameter groups and arguments together."""


def plainly(
    cls: type[torch.optim.Optimizer], groups: list[dict[str, Any]], arguments: dict[str, Any]
) -> torch.optim.Optimizer:
    return cls(groups, **arguments)


def optimizer_factory(
    config: training.Optimizer, compiles: bool = False, rate_factor: Callable[[str], float] = lambda _: 1.0
) -> OptimizerFactory:
    """Returns a function that makes the optimizer of a model, called by the engine after wrapping.

    compiles: whether an update that can be compiled on a CPU is. rate_factor: parameter name → factor of its rate.
    """
    function = own_function(config)
    if function is not None:
        return factory_of(functools.partial(function, **_arguments_of_function(function, config)), "optimizer.name")
    cls: Any = _imported(config)
    arguments = _arguments(config, cls)

    def build(model: nn.Module, make: Maker = plainly) -> torch.optim.Optimizer:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        parameters = [p for _, p in named]
        low_bit.check_whole(cls, parameters)
        fused = {"fused": True} if _fuses(config, parameters) else {}
        try:
            optimizer = make(low_bit.fitted(cls, compiles), _groups(named, config, rate_factor), {**fused, **arguments})
        except (TypeError, ValueError, RuntimeError) as error:
            raise problem("optimizer", f"{cls.__name__} refuses its arguments: {error}", "correct options") from error
        if cls is torch.optim.SGD:
            _start_momentum(getattr(optimizer, "optim", optimizer))  # ZeroRedundancyOptimizer keeps one within
        if low_bit.is_low_bit(cls):
            low_bit.check_pieces(optimizer, parameters)
        elif not _is_torchs(config):
            _check_state(optimizer)
        return optimizer

    return build


def _is_torchs(config: training.Optimizer) -> bool:
    return config.name in KINDS and config.kind.is_torchs


def own_function(config: training.Optimizer) -> Callable[..., Any] | None:
    """Returns the function that the run file names in place of a class, or None."""
    if config.name in KINDS or not set(config.name) & set(".:"):
        return None
    low_rank.check_does_as_it_says(config.name)
    found = import_object(config.name, "optimizer.name", "class")
    return found if callable(found) and not isinstance(found, type) else None


def _arguments_of_function(function: Callable[..., Any], config: training.Optimizer) -> dict[str, Any]:
    """Returns the options of the user's function, and the run file's learning rate if it takes one."""
    takes_lr = "lr" in inspect.signature(function).parameters
    return {**({"lr": config.lr} if takes_lr else {}), **config.options}


def factory_of(function: Callable[..., Any], field: str = "optimizer") -> OptimizerFactory:
    """Returns the factory that calls a function of the user's: parameters → torch.optim.Optimizer.

    It is called once the engine has wrapped the model, since wrapping may replace parameters. Weight decay and groups
    are the function's own. field: where the function was named, for errors.
    """

    def build(model: nn.Module, make: Maker = plainly) -> torch.optim.Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = made_by(function, parameters, field)
        if make is not plainly:  # an engine that makes it itself: DeepSpeed, or ddp with shard_optimizer
            takes = inspect.signature(type(optimizer)).parameters
            options = {key: value for key, value in optimizer.defaults.items() if key in takes}
            optimizer = make(type(optimizer), optimizer.param_groups, options)
        _check_state(optimizer)
        return optimizer

    return build


def made_by(
    function: Callable[..., Any], parameters: list[nn.Parameter], field: str = "optimizer"
) -> torch.optim.Optimizer:
    """Calls a user's function. Raises UserError unless it makes an optimizer of these parameters."""
    name = getattr(getattr(function, "func", function), "__name__", "the function")
    line = "give a function of parameters: optimizer=lambda parameters: AdamW(parameters, lr=3e-4)"
    try:
        optimizer = function(parameters)
    except Exception as error:
        raise problem(field, f"{name} fails: {type(error).__name__}: {error}", line) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise problem(field, f"{name} gives a {type(optimizer).__name__}, no torch.optim.Optimizer", line)
    if low_bit.is_low_bit(type(optimizer)):
        raise problem(field, f"{type(optimizer).__name__} of a function is not known here", "give its name")
    passed, held = {id(p) for p in parameters}, {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not held <= passed:
        why = f"{name} makes it of other parameters than those it is called with, which the engine replaces"
        raise problem(field, why, line)
    return optimizer


def _fuses(config: training.Optimizer, parameters: list[nn.Parameter]) -> bool:
    """Returns whether one kernel may update all parameters. A user's optimizer, or one with options for it, decides
    itself.

    SGD's on a CPU only in fp32: torch 2.13's leaves 16-bit parameters as they are (its vector path writes nothing
    back), which looks like a model that does not learn. Adam's and AdamW's compute 16-bit updates in fp32 and leave out
    a step that is refused (`found_inf`), as on a GPU. tests/optim/test_optimizers.py watches both.
    """
    fuses = config.name in KINDS and config.kind.fuses
    if not fuses or config.options.keys() & {"foreach", "differentiable", "dampening"}:
        return False
    if "momentum" not in config.kind.reads:
        return True
    if any(isinstance(p, DTensor) for p in parameters):
        return False  # torch 2.13 has no fused SGD over sharded parameters
    return all(p.device.type == "cuda" or p.dtype == torch.float32 for p in parameters)


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Makes fused SGD start from zero momentum, which gives the same updates.

    torch 2.13 starts it from uninitialised memory instead: that stays if the first step overflows and is skipped, and a
    parameter that gets its first gradient later than its group is refused.
    """
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"]:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _imported(config: training.Optimizer) -> type[torch.optim.Optimizer]:
    name, path, package = config.name, config.kind.path, config.kind.package
    if name in KINDS and find_spec(package) is None:
        why = f"{name} is {package}'s, which is not installed"
        raise problem("optimizer.name", why, remedy(package))
    low_rank.check_does_as_it_says(path)
    cls = import_object(path, "optimizer.name", "class")
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise problem("optimizer.name", f"{name} is no torch.optim.Optimizer", "name an optimizer class")
    first = next(iter(inspect.signature(cls).parameters), "")
    if first in {"model", "module", "named_parameters"}:
        why = f"{cls.__name__} is made from a model's names ({first}), and here optimizers from parameter groups"
        raise problem("optimizer.name", why, "give one whose first argument is params; adafactor's state is small too")
    return low_rank.fitted(cast(Any, cls))


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes the first step raise UserError if it leaves a state that has no form in a checkpoint."""
    own: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    name = type(own).__name__

    def check(stepped: torch.optim.Optimizer, *_: Any) -> None:
        hook.remove()
        for key, value in ((k, v) for state in stepped.state_dict()["state"].values() for k, v in state.items()):
            if not isinstance(value, torch.Tensor | dict | list | tuple | str | bool | int | float | None):
                why = f"{name} keeps {key} as a {type(value).__name__}, which has no form in a checkpoint"
                raise problem("optimizer.name", why, "take one that keeps tensors and numbers")

    hook = own.register_step_post_hook(check)


def _arguments(config: training.Optimizer, cls: type[torch.optim.Optimizer]) -> dict[str, Any]:
    accepted = inspect.signature(cls).parameters
    arguments: dict[str, Any] = {"lr": config.lr}
    if cls is torch.optim.SGD:
        arguments["momentum"] = config.momentum
    elif config.name in KINDS and config.kind.reads >= ADAMS:
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


def _groups(
    named: Iterable[tuple[str, nn.Parameter]], config: training.Optimizer, rate_factor: Callable[[str], float]
) -> list[dict[str, Any]]:
    """Groups parameters: matrices and filters decay; biases, gains and other vectors do not (as in BERT's and GPT's
    training)."""
    found: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        found.setdefault((parameter.ndim < 2, rate_factor(name)), []).append(parameter)
    groups = []
    for (is_vector, factor), parameters in sorted(found.items(), key=lambda item: item[0]):
        rate = {} if factor == 1.0 else {"lr": config.lr * factor}
        groups.append({"params": parameters, "weight_decay": 0.0 if is_vector else config.weight_decay, **rate})
    return groups
