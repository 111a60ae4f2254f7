"""The state of a model of which DeepSpeed holds parameters, gradients and moments in its own form."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.config import engines as config
from drivetrain.distributed.shard import Shard
from drivetrain.engines.autograd import AutogradEngine
from drivetrain.engines.auxiliary import Companion
from drivetrain.engines.deepspeed import partitions
from drivetrain.engines.state import check_trained, chosen, group_with, kept


class PartitionedEngine(AutogradEngine):
    """Gives and takes weights, gradients and the optimizer's state by parameter, whatever the partitions."""

    _config: config.DeepspeedEngine
    _zero: Any = None  # the DeepSpeedEngine
    _groups: list[list[str]]  # parameter names of each group of the optimizer

    @abstractmethod
    def _make_state(self) -> None:
        """Makes the optimizer create its state; a loaded state replaces it."""

    def shapes(self) -> dict[str, torch.Size]:
        return {name: partitions.shape_of(held) for name, held in self._held().items()}

    def _held(self) -> dict[str, Tensor]:
        """Returns the contents of checkpoints, with parameters in DeepSpeed's form."""
        return kept(self._model, self._model.state_dict(keep_vars=True))

    def weights(self) -> dict[str, Tensor]:
        found = {}
        for name, held in self._held().items():
            whole = partitions.whole(held)
            if self._ranks.is_first:
                found[name] = whole.to("cpu", copy=True) if partitions.is_sharded(held) else whole
        return found

    def _own_state(self, model: nn.Module) -> dict[str, Tensor | Shard]:
        held = kept(model, model.state_dict(keep_vars=True))
        return partitions.present({name: partitions.own(each, self._ranks.rank) for name, each in held.items()})

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._fill(self._model, weights)

    def _load_companion(self, companion: Companion, weights: Mapping[str, Tensor]) -> None:
        self._fill(companion.model, weights)

    def _fill(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        held = kept(model, model.state_dict(keep_vars=True))
        for name, value in weights.items():
            partitions.fill(held[name], value, self._ranks.rank)

    def gradients(self) -> dict[str, Tensor]:
        if self._config.stage == 0:
            return super().gradients()
        return {name: partitions.gradient(p) for name, p in self._model.named_parameters() if p.requires_grad}

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self._config.stage == 0:
            return super()._optimizer_state(optimizer)
        flat = next(iter(optimizer.state.items()), None)
        moments, counters = partitions.kinds(*flat) if flat is not None else ([], {})
        parameters = self._linked(optimizer)
        state = {}
        for name in [name for names in self._groups for name in names] if flat is not None else []:
            own = {key: partitions.own_moment(parameters[name], key, self._ranks.rank) for key in moments}
            state[name] = {**partitions.present(own), **copy.deepcopy(counters)}
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": names}
            for group, names in zip(optimizer.param_groups, self._groups, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def _load_optimizer_state(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        if self._config.stage == 0:
            return super()._load_optimizer_state(optimizer, saved)
        every, groups = dict(self._model.named_parameters()), saved["param_groups"]
        check_trained([name for names in self._groups for name in names], every, groups)
        for group, names in zip(optimizer.param_groups, self._groups, strict=True):
            group.update({**group_with(groups, names), **chosen(optimizer, group), "params": group["params"]})
        if not saved["state"]:
            return None
        if not optimizer.state:
            self._make_state()
        parameters = self._linked(optimizer)
        for name, values in saved["state"].items():
            for key, value in values.items():
                if isinstance(value, Tensor) and value.shape == partitions.shape_of(parameters[name]):
                    partitions.set_moment(parameters[name], key, value, self._ranks.rank)
        _, counters = partitions.kinds(*next(iter(optimizer.state.items())))
        one = next(iter(saved["state"].values()))
        for state in optimizer.state.values():
            for key in counters:
                state[key] = copy.deepcopy(one[key])
        return None

    def _linked(self, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
        """Returns the parameters by name, with their moments linked."""
        parameters = dict(self._model.named_parameters())
        for flat, names in zip(partitions.masters(self._zero.optimizer), self._groups, strict=False):
            partitions.link_moments([parameters[name] for name in names], flat, optimizer.state.get(flat, {}))
        return parameters
