"""The state of a model that is spread over a mesh: what checkpoints hold, joined from stages and pieces of layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.config.engines.mesh import MeshEngine as Config
from drivetrain.distributed.shard import Shard
from drivetrain.engines.autograd import AutogradEngine
from drivetrain.engines.base import State
from drivetrain.engines.fsdp import SameParameters
from drivetrain.engines.mesh.parallelize import RankPart
from drivetrain.engines.mesh.state import (
    Held,
    check_stages,
    groups_of,
    joined_groups,
    joined_stages,
    load_own_state,
    own_state,
    stages_items,
)
from drivetrain.engines.mesh.topology import MeshPosition
from drivetrain.engines.state import gathered, kept, load_weights
from drivetrain.errors import RunError


class SpreadState(AutogradEngine):
    """Gives and takes weights, gradients and the optimizer's state by parameter, under their global names."""

    _config: Config
    _place: MeshPosition
    _part: RankPart  # what this rank has of the model
    _held: Held  # parameters as the optimizer updates them
    _same: SameParameters | None

    def shapes(self) -> dict[str, torch.Size]:
        return kept(self._model, self._part.whole)

    def _of_all_stages(self, own: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        return stages_items(self._ranks, self._config.pp, self._place.leads, own)

    def weights(self) -> dict[str, Tensor]:
        state, names = kept(self._model, self._model.state_dict()), self.shapes().keys()
        own = ((name, gathered(held)) for name, held in state.items() if name in self._part.speaks_for)
        found = self._of_all_stages((name, whole.cpu()) for name, whole in own)
        if self._ranks.is_first and found.keys() != names:
            raise RunError(f"no stage has {', '.join(names - found.keys())}")
        return {name: found[name] for name in names if name in found}

    def state_dict(self) -> State:
        if self._same is not None:
            self._same.check()
        return super().state_dict()

    def _own_weights(self) -> dict[str, Tensor | Shard]:
        own = {name: held for name, held in super()._own_weights().items() if name in self._part.speaks_for}
        check_stages(self._ranks.all_gather(list(own) if self._place.leads else []), self.shapes())
        return own

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        of_stages = self._ranks.all_gather(groups_of(optimizer, self._held) if self._place.leads else [])
        groups = joined_groups(of_stages, self._part.whole)
        return {"state": own_state(self._held, optimizer), "param_groups": groups}

    def _load_optimizer_state(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        load_own_state(self._held, optimizer, saved)

    def save_assets(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        self._workload.save_assets(self._model, folder)
        if self._workload.adapters is not None:
            self._workload.adapters.write(self._part.outline or self._model, weights, folder)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        own = self._model.state_dict()
        load_weights(self._model, {name: weights[name] for name in own if name in weights})

    def gradients(self) -> dict[str, Tensor]:
        own = {n: gathered(p.grad).cpu() for n, p in self._model.named_parameters() if p.grad is not None}
        found = joined_stages(own, self._config.pp, self._place.group("pp"))
        return {name: found[name] for name in self._part.trains if name in found}
