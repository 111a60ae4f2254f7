"""Others' checkpoints as they were read, before they are fitted to a run, and the notes of a conversion."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Moments = dict[str, dict[str, Any]]  # parameter name → the optimizer's state of it


@dataclass(frozen=True)
class Note:
    """The fate of a part of a checkpoint."""

    item: str
    carried: bool
    what: str


@dataclass(frozen=True)
class Positions:
    """An optimizer's state as torch numbers it: by a parameter's position among all groups."""

    state: dict[int, dict[str, Any]]
    sizes: list[int]  # parameters of each group


@dataclass
class Theirs:
    """A checkpoint with its own software's names. None: it does not state the value."""

    weights: dict[str, Tensor]
    moments: Moments | Positions | None = None
    arguments: list[dict[str, Any]] = field(default_factory=list)  # rate and the like, of each group
    step: int | None = None
    skipped: int = 0  # of those steps
    samples: int | None = None
    scaler: dict[str, Any] | None = None
    clipping: float | None = None  # of the gradients' norm
    notes: list[Note] = field(default_factory=list)


def of_torch(saved: dict[str, Any]) -> tuple[Positions, list[dict[str, Any]]]:
    """Converts an optimizer.state_dict() into its states, and the arguments of its groups."""
    groups = saved["param_groups"]
    arguments = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return Positions(saved["state"], [len(group["params"]) for group in groups]), arguments
