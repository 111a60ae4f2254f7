"""One process, one device."""

from __future__ import annotations

from torch import nn

from drivetrain.engines.eager import EagerEngine


class SingleEngine(EagerEngine):
    def _wrap(self, model: nn.Module) -> nn.Module:
        return model
