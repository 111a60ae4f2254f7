"""nn.DataParallel: one process, the model copied to each of its GPUs in every step. PyTorch recommends ddp instead."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import nn

from drivetrain.config import engines as config
from drivetrain.engines.base import Engaged
from drivetrain.engines.replicas import GpuReplicas, ThreadReplicas
from drivetrain.engines.single import AloneEngine
from drivetrain.errors import RunError


def wrap_dp(model: nn.Module, device: torch.device, replicas: int) -> ThreadReplicas | GpuReplicas:
    """The model is on `device`, the first of the replicas' devices."""
    if device.type == "cpu":
        return ThreadReplicas(model, replicas)
    return GpuReplicas(model, device_ids=list(range(device.index, device.index + replicas)))


class DpEngine(AloneEngine):
    _config: config.DpEngine

    def _wrap(self, model: nn.Module) -> nn.Module:
        return wrap_dp(model, self._device, self._options.devices)

    def _check_engaged(self) -> None:
        assert isinstance(self._forward, ThreadReplicas | GpuReplicas)
        if self._forward.num_replicas != self._options.devices:
            raise RunError(f"engine=dp has {self._forward.num_replicas} replicas, not {self._options.devices}")

    def _ready_for_inference(self) -> None:
        super()._ready_for_inference()
        cast(ThreadReplicas | GpuReplicas, self._forward).forget()

    def engaged(self) -> Engaged:
        return replace(super().engaged(), emulated=self._device.type == "cpu")
