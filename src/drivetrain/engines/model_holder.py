"""Converts an engine's state, its model, optimizer and the models beside it, to global names for checkpoints, and
back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.shard import Shard, piece_of
from drivetrain.engines.auxiliary import AuxiliaryModels, Companion
from drivetrain.engines.base import Engine, HeldPart, State
from drivetrain.engines.state import (
    gathered,
    kept,
    load_optimizer_state,
    load_weights,
    local_part,
    optimizer_state,
    optimizer_tensors,
)
from drivetrain.errors import problem
from drivetrain.workloads.base import Workload


class ModelHolder(Engine):
    """Holds one wrapped model, its optimizer, and the models beside it."""

    _ranks: Communicator
    _workload: Workload
    _model: nn.Module  # with parameters under their global names
    _optimizer: torch.optim.Optimizer | None
    _auxiliary: AuxiliaryModels
    _scaler: torch.amp.GradScaler

    def state_dict(self) -> State:
        assert self._optimizer is not None, "set up for evaluation only"
        state: State = {
            "model": self._own_weights(),
            "optimizer": self._optimizer_state(self._optimizer),
            "engine": {"scaler": self._scaler.state_dict()},
        }
        moved = {name: self._own_state(each.model) for name, each in self._auxiliary.moved.items()}
        beside = {"auxiliary": self._auxiliary.summary(), "workload": self._workload.state_dict()}
        if moved:
            state["auxiliary"] = moved
        if any(beside.values()):
            state["beside"] = beside
        return state

    def _own_state(self, model: nn.Module) -> dict[str, Tensor | Shard]:
        return {name: piece_of(held) for name, held in kept(model, model.state_dict()).items()}

    def _own_weights(self) -> dict[str, Tensor | Shard]:
        return self._own_state(self._model)

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return optimizer_state(self._model, optimizer)

    def load_state_dict(self, state: State) -> None:
        assert self._optimizer is not None, "set up for evaluation only"
        self.load_weights(state["model"])
        self._load_optimizer_state(self._optimizer, state["optimizer"])
        self._load_beside(state)
        if self._scaler.is_enabled() and state["engine"]["scaler"]:  # empty where the saved run did not scale
            self._scaler.load_state_dict(state["engine"]["scaler"])

    def _load_beside(self, state: State) -> None:
        """Loads auxiliary models and the workload's own state; a checkpoint without them is of a run that had none."""
        beside = state.get("beside") or {}
        saved = beside.get("auxiliary") or {}
        self._ranks.on_first(lambda: self._auxiliary.check_frozen(saved.get("frozen", {})))
        lacking = [name for name in self._auxiliary.moved if name not in (state.get("auxiliary") or {})]
        if lacking:
            fix = "start anew with --overwrite, or give the checkpoint of a run that has it"
            raise problem("--resume", f"the checkpoint holds no auxiliary model {', '.join(lacking)}", fix)
        self.load_auxiliary(state.get("auxiliary") or {})
        self._auxiliary.steps = saved.get("steps", 0)
        if beside.get("workload"):
            self._workload.load_state_dict(beside["workload"])

    def load_auxiliary(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        for name, each in self._auxiliary.moved.items():
            if name in saved:
                self._load_companion(each, saved[name])

    def _load_companion(self, companion: Companion, weights: Mapping[str, Tensor]) -> None:
        load_weights(companion.model, weights)

    def _load_optimizer_state(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        load_optimizer_state(self._model, optimizer, saved)

    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in kept(self._model, self._model.state_dict()).items()}

    def weights(self) -> dict[str, Tensor]:
        state = kept(self._model, self._model.state_dict())
        whole = {name: self._gather(held) for name, held in state.items()}
        return {name: tensor for name, tensor in whole.items() if tensor is not None}

    def gradients(self) -> dict[str, Tensor]:
        return {name: gathered(p.grad) for name, p in self._model.named_parameters() if p.grad is not None}

    def _gather(self, held: Tensor) -> Tensor | None:
        """Returns the whole tensor on the first rank, None elsewhere. A sharded one goes to CPU memory at once."""
        whole = gathered(held)
        if not self._ranks.is_first:
            return None
        return whole if whole is held else whole.cpu()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        load_weights(self._model, weights)

    def held_tensors(self) -> dict[HeldPart, list[Tensor]]:
        held: dict[HeldPart, list[Tensor]] = {
            "parameters": [*self._model.parameters(), *self._auxiliary.tensors()],
            "buffers": list(self._model.buffers()),
            "gradients": [p.grad for p in self._model.parameters() if p.grad is not None],
            "optimizer": [] if self._optimizer is None else optimizer_tensors(self._optimizer),
        }
        return {part: [local_part(tensor) for tensor in tensors] for part, tensors in held.items()}

    def save_assets(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        self._workload.save_assets(self._model, folder)
        self._workload.write_parts(self._model, weights, folder)

    def check_base(self, folder: Path) -> list[str]:
        return [] if self._workload.adapters is None else self._workload.adapters.check(folder)
