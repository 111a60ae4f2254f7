"""Converts an optimizer's state by position into one by name.

torch numbers parameters through the groups, each in the order in which the script collected them: that of the model, in
all but odd scripts. So it is enough to know which parameters are in which group. Scripts make one group of all, or
separate those that do not decay; a numbering that disagrees with the shapes of the states is ruled out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from drivetrain.checkpoint.convert.foreign import Moments, Positions
from drivetrain.errors import problem

# as the Transformers Trainer names what does not decay
NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)


def by_name(given: Positions, shapes: Mapping[str, torch.Size], own: Sequence[Sequence[str]]) -> Moments:
    """shapes: of trained parameters, in the model's order. own: names of the groups of this run's optimizer.

    Raises UserError if no numbering fits, or several do.
    """
    fitting = []
    for names in _orders(shapes, own, given.sizes):
        if names not in fitting and _fits(given, shapes, names):
            fitting.append(names)
    if len(fitting) == 1:
        return {fitting[0][position]: state for position, state in given.state.items()}
    groups = f"{len(given.sizes)} group(s) of {', '.join(map(str, given.sizes))} parameters"
    why = f"the optimizer's states are numbered, in {groups}, and "
    why += "several ways to number this model's fit" if fitting else f"this model's {len(shapes)} do not fit them"
    raise problem("--from", why, "give --weights-only, or a checkpoint that has the states by name (dcp)")


def _orders(shapes: Mapping[str, torch.Size], own: Sequence[Sequence[str]], sizes: Sequence[int]) -> list[list[str]]:
    names = list(shapes)
    matrices, vectors = _split(names, [len(shapes[name]) > 1 for name in names])
    decaying, others = _split(names, [len(shapes[n]) > 1 and not NO_DECAY.search(n) for n in names])
    by_their_names, rest = _split(names, [not NO_DECAY.search(name) for name in names])
    ways = [[names], [matrices, vectors], [vectors, matrices], [decaying, others], [others, decaying]]
    ways += [[by_their_names, rest], [rest, by_their_names], [list(group) for group in own]]
    return [[name for group in way for name in group] for way in ways if [len(group) for group in way] == list(sizes)]


def _split(names: Sequence[str], first: Sequence[bool]) -> tuple[list[str], list[str]]:
    pairs = list(zip(names, first, strict=True))
    return [name for name, is_first in pairs if is_first], [name for name, is_first in pairs if not is_first]


def _fits(given: Positions, shapes: Mapping[str, torch.Size], names: Sequence[str]) -> bool:
    tensors = [
        (value, shapes[names[position]])
        for position, state in given.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.ndim and key != "step"
    ]
    return all(value.shape == shape for value, shape in tensors)
