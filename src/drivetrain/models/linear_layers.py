"""Finds the linear layers of a model that are replaced by others: quantised, fake-quantised, or computed in 8 bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import get_args

from torch import nn

from drivetrain.config.quantised import GroupSize
from drivetrain.errors import problem


def plain_layers(model: nn.Module, skip: Collection[str] = ()) -> list[list[str]]:
    """Returns all names of each layer, since it may be used in several places. Names keep no weight alive.

    skip: names of modules that are not replaced, with all within them. So do weights that several modules share
    (embeddings tied to a head), and subclasses of nn.Linear, whose owners may read the weight (nn.MultiheadAttention).
    """
    users = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        kept = any(name == given or name.startswith(f"{given}.") for given in skip)
        if name and not kept and type(module) is nn.Linear and users[id(module.weight)] == 1:
            found.setdefault(id(module), []).append(name)
    return list(found.values())


def replace(model: nn.Module, names: Sequence[str], make: Callable[[nn.Linear], nn.Module]) -> None:
    """Replaces one layer in all its places, in place."""
    linear = model.get_submodule(names[0])
    assert isinstance(linear, nn.Linear)
    made = make(linear)
    made.train(linear.training)
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made)


def check_groups(model: nn.Module, layers: Sequence[Sequence[str]], size: int, block: str) -> None:
    """Raises UserError if rows are no whole number of groups. block: of the run file, which has the size and a
    format."""
    inputs = {names[0]: model.get_parameter(f"{names[0]}.weight").shape[1] for names in layers}
    odd = [f"{name} has {number} inputs" for name, number in inputs.items() if number % size]
    if odd:
        fits = [each for each in get_args(GroupSize) if not any(number % each for number in inputs.values())]
        shown = ", ".join(odd[:3]) + (f" and {len(odd) - 3} layers more" if len(odd) > 3 else "")
        fix = f"give group_size={fits[-1]}" if fits else f"no group size fits: take another {block}.format"
        raise problem(f"{block}.group_size", f"{shown}, which is no multiple of {size}", fix)
