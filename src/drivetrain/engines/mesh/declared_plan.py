"""Checks a tensor-parallel plan that a user declared against the model: reports everything that does not fit, at once.

Other faults (a layer between two parts that reads whole features) are found by the dry run at set-up.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from drivetrain.engines.mesh.tensor_plan import SAME, SPLIT, SUMMED, matches
from drivetrain.errors import Problem, UserError
from drivetrain.memory.recompute import repeated_blocks
from drivetrain.models.adapted_layers import layers_of

FIELD = "workload.path (tensor_parallel)"
MOST_SHOWN = 8

LINEAR, EMBEDDING = SPLIT[:4], SPLIT[4:]  # which style splits which layers
STYLES = (*SPLIT, SUMMED, "replicate")


def check_declared(model: nn.Module, declared: Mapping[str, str]) -> None:
    """Raises UserError with all faults: unknown styles, names of no layer, layers of another kind, halves of pairs."""
    modules = dict(model.named_modules())
    problems: list[Problem] = []
    plan: dict[str, str] = {}
    for pattern, given in declared.items():
        style = SAME.get(given) or given
        found = [name for name in modules if matches(pattern, name)]
        wrong = [*_of_style(pattern, given), *_of_name(model, pattern, found)]
        problems += wrong or _of_kind(model, pattern, style, found)
        plan |= dict.fromkeys(found, style if style in STYLES else "")
    problems += [] if problems else _half_pairs(model, plan)  # a name that is off leaves half a pair, too
    if problems:
        raise UserError(problems)


def _of_style(pattern: str, given: str) -> Iterator[Problem]:
    if given not in (*STYLES, *SAME):
        near = difflib.get_close_matches(given, STYLES, n=1)
        fix = f"did you mean {near[0]}?" if near else f"there are {', '.join(STYLES)}"
        yield Problem(FIELD, f"{pattern} is given the style {given!r}, which there is not", fix)


def _of_name(model: nn.Module, pattern: str, found: Sequence[str]) -> Iterator[Problem]:
    if not found:
        why = f"{pattern} is the name of no layer of {type(model).__name__}"
        known = _layers(model)
        near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.7)
        yield Problem(FIELD, why, f"did you mean {' or '.join(near)}?" if near else f"there are {_shown(known)}")


def _of_kind(model: nn.Module, pattern: str, style: str, found: Sequence[str]) -> list[Problem]:
    """Reports a style on a layer that it does not split."""
    kind = nn.Linear if style in LINEAR else nn.Embedding if style in EMBEDDING else nn.Module
    bare = layers_of(model)
    others = [name for name in found if not isinstance(bare.get(name) or model.get_submodule(name), kind)]
    if not others:
        return []
    module = bare.get(others[0]) or model.get_submodule(others[0])
    why = f"{others[0]} is of type {type(module).__name__}; {style} splits {kind.__name__}"
    inside = [name for name in _layers(model) if matches(f"{pattern}.*", name)]
    fix = f"name its layers: {_shown(inside)}" if inside else "leave it out of the plan"
    if isinstance(module, nn.Linear | nn.Embedding):
        own = LINEAR if isinstance(module, nn.Linear) else EMBEDDING
        fix = f"for {type(module).__name__} there is {', '.join(own)}"
    return [Problem(FIELD, why, fix)]


def _half_pairs(model: nn.Module, plan: Mapping[str, str]) -> Iterator[Problem]:
    """Reports blocks with layers that produce parts of features (colwise) and none that takes them (rowwise), or the
    reverse.

    If some lack the one and some the other, the two may belong together: the dry run decides.
    """
    blocks = {id(block) for block in repeated_blocks(model)}
    prefixes = [name for name, module in model.named_modules() if id(module) in blocks]
    styles: dict[str, dict[str, list[str]]] = {}
    for name, style in plan.items():
        if style in ("colwise", "rowwise"):
            block = next((prefix for prefix in prefixes if name.startswith(f"{prefix}.")), "")
            styles.setdefault(block, {}).setdefault(style, []).append(name)
    lone = {block: next(iter(of_block.items())) for block, of_block in styles.items() if len(of_block) == 1}
    if len({style for style, _ in lone.values()}) != 1:
        return
    style = next(style for style, _ in lone.values())
    for pattern in dict.fromkeys(_general(name) for _, names in lone.values() for name in names):
        yield _half_pair(model, pattern, style, plan)


def _half_pair(model: nn.Module, pattern: str, style: str, plan: Mapping[str, str]) -> Problem:
    first = style == "colwise"
    linear = {name: layer for name, layer in layers_of(model).items() if isinstance(layer, nn.Linear)}
    lone = next(module for name, module in linear.items() if matches(pattern, name))
    near = [
        _general(name)
        for name, module in linear.items()
        if name not in plan and _general(name).partition("*")[0] == pattern.partition("*")[0]  # of the same blocks
        if (lone.out_features == module.in_features if first else module.out_features == lone.in_features)
    ]
    such = f", such as {_shown(list(dict.fromkeys(near)))}" if near else ""
    if first:
        why = f"{pattern} (colwise) gives each rank a part of its features, and no layer takes parts (rowwise)"
        return Problem(FIELD, why, f"give rowwise to the layer that reads them{such}; or take colwise_gather_output")
    why = f"{pattern} (rowwise) takes a part of its features on each rank, and no layer gives parts (colwise)"
    return Problem(FIELD, why, f"give colwise to the layer before it{such}; or take rowwise_split_input")


def _layers(model: nn.Module) -> list[str]:
    """Returns names of layers that can be split, with the numbers of repeated parts as *."""
    return list(dict.fromkeys(map(_general, layers_of(model))))


def _general(name: str) -> str:
    """Generalises layers.0.wide → layers.*.wide; the number of a layer in a Sequential is its name."""
    *within, last = name.split(".")
    return ".".join([*("*" if part.isdigit() else part for part in within), last])


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return f"{', '.join(names[:MOST_SHOWN]) or 'none'}{more}"
