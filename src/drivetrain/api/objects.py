"""Separates the caller's arguments: those that stand for keys of the run file, and objects that are held for the
run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.config.optimizers import KINDS
from drivetrain.config.training import IMPORT_PATH
from drivetrain.errors import Problem, UserError, problem
from drivetrain.objects import held
from drivetrain.optim.optimizers import made_by
from drivetrain.tracking.events import Tracker

# as a user's file names them; those of WITH are of no use without a model
MODEL = ("model", "train_data", "loss")
WITH = ("evaluation_data", "metrics", "collate", "predict", "loss_sum", "count", "splits_batches", "tensor_parallel")
# the key of a run file that a mapping in an object's place stands for
KEYS = {"model": "model", "loss": "workload.loss", "optimizer": "optimizer", "schedule": "schedule"}


def sorted_out(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the keys of the run file that arguments stand for, and the objects that the run is made from, by name.

    arguments: by name; None stands for one that was left out. A mapping or a text is a key of the run file, anything
    else an object. Raises UserError with all that are neither.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    keys: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in given.items():
        if name in KEYS and isinstance(value, Mapping | str):
            keys[KEYS[name]] = value
            continue
        try:
            found = _optimizer(value) if name == "optimizer" else _schedule(value) if name == "schedule" else {}
        except UserError as error:
            problems += error.problems
            continue
        keys |= found
        if name not in ("optimizer", "schedule") or _names(found) == held.PREFIX + name:
            objects[name] = value
    problems += _missing(objects)
    if problems:
        raise UserError(problems)
    if "model" in objects:
        keys = {"workload": {"type": "objects"}, **keys}
    return keys, objects


def trackers(given: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the run file's list of trackers, and the classes among them that are held. Other values are unchanged."""
    if not isinstance(given, list | tuple):
        return given, {}
    names: list[Any] = []
    classes: dict[str, Any] = {}
    for each in given:
        is_class = isinstance(each, type) and issubclass(each, Tracker)
        names.append(f"{held.PREFIX}tracker_{len(classes)}" if is_class else each)
        if is_class:
            classes[f"tracker_{len(classes)}"] = each
    return names, classes


def _missing(objects: Mapping[str, Any]) -> list[Problem]:
    names = [name for name in (*MODEL, *WITH) if name in objects]
    if not names:
        return []
    has_sum = "loss_sum" in objects and "count" in objects
    needed = [name for name in MODEL if name not in objects and not (name == "loss" and has_sum)]
    if "loss" in objects and "loss_sum" in objects:
        return [Problem("loss", "loss and loss_sum were both given", "give one of them")]
    why = f"is required with {names[0]}="
    return [Problem(name, why, f"give {name}=... as well") for name in needed]


def _names(found: Mapping[str, Any]) -> Any:
    return next((value.get("name") for value in found.values()), None)


def _optimizer(given: Any) -> dict[str, Any]:
    """Returns the key of an optimizer's class or factory. Raises UserError for an optimizer that is already made."""
    if isinstance(given, torch.optim.Optimizer):
        raise made_already(given)
    if isinstance(given, type):
        is_torchs = getattr(torch.optim, given.__name__, None) is given
        path = f"torch.optim:{given.__name__}"
        short = next((name for name, kind in KINDS.items() if is_torchs and kind.path == path), None)
        return {"optimizer": {"name": short or _path_of(given) or f"{held.PREFIX}optimizer"}}
    if not callable(given):
        fix = "give a name (adamw), a class, or a function: optimizer=lambda parameters: AdamW(parameters, lr=3e-4)"
        raise problem("optimizer", f"a {type(given).__name__} was given", fix)
    block: dict[str, Any] = {"name": f"{held.PREFIX}optimizer"}
    if "lr" not in inspect.signature(given).parameters:  # else it is called with the run's
        tried = made_by(given, [nn.Parameter(torch.zeros(2, 2))])
        block["lr"] = float(tried.param_groups[0]["lr"])
    return {"optimizer": block}


def made_already(optimizer: torch.optim.Optimizer) -> UserError:
    """Returns the error for an optimizer that was made before the engine wrapped its model."""
    name = type(optimizer).__name__
    rate = optimizer.param_groups[0].get("lr", 1e-3) if optimizer.param_groups else 1e-3
    why = (
        f"this {name} holds the parameters of now, and sharding puts others in their place: its steps would move "
        "nothing"
    )
    fix = f"give a function that makes it: optimizer=lambda parameters: {name}(parameters, lr={float(rate):g})"
    return problem("optimizer", why, fix)


def _path_of(cls: type) -> str | None:
    """Returns the import path of a class in a module; None if a script or notebook defines it."""
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        return None
    import re

    path = f"{cls.__module__}:{cls.__qualname__}"
    return path if re.fullmatch(IMPORT_PATH, path) else None


def _schedule(given: Any) -> dict[str, Any]:
    if isinstance(given, LRScheduler):
        why = f"this {type(given).__name__} belongs to an optimizer that is made already"
        fix = "give a name (cosine), or a function of (updates, total_updates) that gives the factor of the peak rate"
        raise problem("schedule", why, fix)
    if not callable(given):
        fix = "give a name (cosine), a mapping, or a function of (updates, total_updates)"
        raise problem("schedule", f"a {type(given).__name__} was given", fix)
    return {"schedule": {"name": f"{held.PREFIX}schedule"}}
