"""GaLore: Adam's moments of a matrix's gradient in few dimensions; the package pytorch-optimizer's.

Zhao et al. 2024, "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", algorithm 2: every
`update_proj_gap` steps the gradient's leading singular vectors along its shorter side are found; moments are of the
gradient projected on them, and the update is projected back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import problem

PROJECTOR = "projector"  # the key of a matrix's state that holds an object, of which checkpoints have the parts
FOUND = ("ortho_matrix", "last_svd_step")
FIT = ("rank", "projection_type")  # what the shapes of moments depend on

BY_GROUP = "it compresses only groups that carry a rank, which a run file cannot give: it would train as plain AdamW"
RANDOM = "it updates along random directions, which APOLLO's paper does not, and draws others on each rank"
REFUSED = {**dict.fromkeys(("galore_torch", "q_galore_torch", "apollo_torch"), BY_GROUP), "pytorch_optimizer": RANDOM}


def check_does_as_it_says(path: str) -> None:
    """Raises UserError for classes that seem to work and do not."""
    package, _, name = path.replace(":", ".").partition(".")
    if package in REFUSED and (package != "pytorch_optimizer" or name.endswith("APOLLO")):
        fix = "give galore (pip install 'drivetrain[lowrank]'), adafactor or adamw8bit"
        raise problem("optimizer.name", f"{path}: {REFUSED[package]}", fix)


@functools.cache
def fitted(cls: Any) -> type[torch.optim.Optimizer]:
    """Returns GaLore with explicit arguments for those it reads from parameter groups, and with a state that is plain
    tensors when it is saved; any other class unchanged."""
    if cls.__module__ != "pytorch_optimizer.optimizer.galore":
        return cls

    class Galore(cls):
        def __init__(
            self,
            params: Any,
            lr: float = 1e-3,
            betas: Sequence[float] = (0.9, 0.999),
            eps: float = 1e-8,
            weight_decay: float = 0.0,
            *,
            rank: int = 128,
            update_proj_gap: int = 200,
            scale: float = 0.25,
            projection_type: str = "std",
            foreach: bool | None = None,
        ) -> None:
            _check(rank, update_proj_gap)
            projection = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale}
            adam = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "foreach": foreach}
            super().__init__(params, projection_type=projection_type, **projection, **adam)

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for state in (self.state[p] for p in group["params"] if p in self.state):
                    if isinstance(state.get(PROJECTOR), dict):
                        state[PROJECTOR] = _projector(state[PROJECTOR], group)
            return super().step(closure)

        def state_dict(self) -> dict[str, Any]:
            found: dict[str, Any] = super().state_dict()
            return {**found, "state": {number: _plain(state) for number, state in found["state"].items()}}

    Galore.__name__, Galore.__module__ = cls.__name__, cls.__module__
    made: type[torch.optim.Optimizer] = Galore
    return made


def _check(rank: int, gap: int) -> None:
    for name, value in (("rank", rank), ("update_proj_gap", gap)):
        if not (isinstance(value, int) and value > 0):
            raise ValueError(f"{name} ({value}) is no whole number above 0")


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter's state in a checkpoint's form; also a state that was loaded and not yet used."""
    projector = state.get(PROJECTOR)
    if projector is None or isinstance(projector, dict):
        return state
    return {**state, PROJECTOR: {name: getattr(projector, name) for name in FOUND + FIT}}


def _projector(parts: dict[str, Any], group: dict[str, Any]) -> Any:
    """Restores the projector, with this run's arguments. Raises UserError if saved moments do not fit them."""
    from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector

    for name in FIT:
        if parts[name] != group[name]:
            why = f"the checkpoint's moments are of {name}={parts[name]}, and the run file gives {group[name]}"
            raise problem(f"optimizer.options.{name}", why, f"give {parts[name]}")
    projector = GaLoreProjector(**{name: group[name] for name in (*FIT, "update_proj_gap", "scale")})
    for name in FOUND:
        setattr(projector, name, parts[name])
    return projector


def tensors(value: Any) -> list[Tensor]:
    """Returns the tensors that a projector holds; none for any other object."""
    parts = value if isinstance(value, dict) else vars(value) if hasattr(value, FOUND[0]) else {}
    found = parts.get(FOUND[0])
    return [part for part in (found if isinstance(found, tuple) else (found,)) if isinstance(part, Tensor)]
