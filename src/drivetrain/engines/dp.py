"""nn.DataParallel: one process, the model copied to each of its GPUs in every step. PyTorch recommends ddp instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch import nn

from drivetrain.config import engines as config
from drivetrain.data.loader import MicroBatch
from drivetrain.engines.base import Engaged
from drivetrain.engines.replicas import GpuReplicas, ThreadReplicas
from drivetrain.engines.single import AloneEngine
from drivetrain.errors import RunError
from drivetrain.workloads.base import Batch

T = TypeVar("T")


def wrap_dp(
    model: nn.Module, device: torch.device, replicas: int, one_by_one: bool = False
) -> ThreadReplicas | GpuReplicas:
    """Wraps the model, which is on `device`, the first of the replicas' devices. one_by_one: replicas on a CPU compute
    one after the other, since what observes them cannot be on several threads at once."""
    if device.type == "cpu":
        return ThreadReplicas(model, replicas, at_once=1 if one_by_one else replicas)
    return GpuReplicas(model, device_ids=list(range(device.index, device.index + replicas)))


class DpEngine(AloneEngine):
    _config: config.DpEngine
    runs_own_batches = False  # each batch is divided among the replicas

    def _wrap(self, model: nn.Module) -> nn.Module:
        return wrap_dp(model, self._device, self._options.devices, one_by_one=self._options.traced)

    def _check_engaged(self) -> None:
        assert isinstance(self._forward, ThreadReplicas | GpuReplicas)
        if self._forward.num_replicas != self._options.devices:
            raise RunError(f"engine=dp has {self._forward.num_replicas} replicas, not {self._options.devices}")

    def _ready_for_inference(self) -> None:
        super()._ready_for_inference()
        self._forget_replicas()

    def without_gradient(self, micro_batches: Sequence[MicroBatch], work: Callable[[nn.Module, Batch], T]) -> list[T]:
        self._forget_replicas()
        found = super().without_gradient(micro_batches, work)
        self._forget_replicas()  # the window that follows makes its own
        return found

    def _forget_replicas(self) -> None:
        """Drops the replicas that forwards without gradient share: they have the weights of the time when they were
        made."""
        cast(ThreadReplicas | GpuReplicas, self._forward).forget()

    def engaged(self) -> Engaged:
        return replace(super().engaged(), emulated=self._device.type == "cpu")
