"""Plans which rank writes what: each rank computes the same plan from the outlines of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drivetrain.checkpoint.state import Formless, State, split
from drivetrain.checkpoint.tensor_file import Kind, Layout, kind_of, lay_out
from drivetrain.distributed.shard import Shard

Place = tuple[tuple[int, ...], tuple[int, ...]]  # of a piece: where it begins, and its shape


@dataclass(frozen=True)
class ManifestPart:
    """A rank's share of a part of the state."""

    tensors: dict[str, Tensor | Shard]
    tree: Any

    @staticmethod
    def of(state: State) -> ManifestPart:
        """Returns a rank's share. Raises Formless for a value that has no form in a checkpoint."""
        return ManifestPart(*split(state))

    def outline(self) -> Outline:
        places = {name: held.place if isinstance(held, Shard) else None for name, held in self.tensors.items()}
        return Outline({name: (kind_of(held), places[name]) for name, held in self.tensors.items()}, self.tree)


@dataclass(frozen=True)
class Outline:
    """The share without its numbers. A place is None if the rank has the whole tensor."""

    held: dict[str, tuple[Kind, Place | None]]
    tree: Any


@dataclass(frozen=True)
class Plan:
    """The plan of one part: its file, its tree, and the tensors that each rank writes."""

    layout: Layout
    tree: Any
    writes: list[list[str]]


def plan_of(outlines: Sequence[Outline]) -> Plan:
    """Makes the plan. outlines: of all ranks. If several hold the same, the first one writes it. Raises Formless if
    pieces do not fit together."""
    kinds: dict[str, Kind] = {}
    places: dict[str, dict[Place | None, int]] = {}  # of each tensor: what is written, and by whom
    for rank, outline in enumerate(outlines):
        for name, (kind, place) in outline.held.items():
            if kinds.setdefault(name, kind) != kind:
                raise Formless(f"{name} is {kinds[name]} on one rank and {kind} on rank {rank}")
            if place is None or 0 not in place[1]:
                places.setdefault(name, {}).setdefault(place, rank)
    for name, kind in kinds.items():
        _check_whole(name, kind, places.setdefault(name, {}))
    writes: list[list[str]] = [[] for _ in outlines]
    for name, writers in places.items():
        for rank in writers.values():
            writes[rank].append(name)
    return Plan(lay_out(kinds), merged([outline.tree for outline in outlines]), writes)


def _check_whole(name: str, kind: Kind, writers: dict[Place | None, int]) -> None:
    if None in writers:
        rank = writers[None]
        writers.clear()
        writers[None] = rank
        return
    together = sum(math.prod(place[1]) for place in writers if place is not None)
    if together != kind.numel:
        raise Formless(f"the ranks hold {together:,} of {kind.numel:,} numbers of {name}")


def merged(trees: Sequence[Any]) -> Any:
    """Merges states of which ranks hold different names; a value that is no table of names is the first rank's."""
    if not all(isinstance(tree, Mapping) for tree in trees):
        return trees[0]
    found: dict[str, list[Any]] = {}
    for tree in trees:
        for name, value in tree.items():
            found.setdefault(name, []).append(value)
    return {name: merged(values) for name, values in found.items()}
