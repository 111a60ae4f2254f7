"""Keeps the statistics that a forward pass in training changes beside gradients: BatchNorm's running ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Statistics:
    """The statistics before a window that shall not count."""

    def __init__(self, model: nn.Module) -> None:
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
        self.buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self._kept = [buffer.clone() for buffer in self.buffers]

    def __bool__(self) -> bool:
        return bool(self.buffers)

    def keep(self) -> None:
        if self.buffers:
            torch._foreach_copy_(self._kept, self.buffers)

    def put_back(self, where: bool | Tensor = True) -> None:
        """Restores the statistics. where: whether to, as a bool or as a scalar on the device for which the host does
        not wait."""
        if not self.buffers or where is False:
            return
        kept = self._kept
        if isinstance(where, Tensor):
            pairs = zip(self._kept, self.buffers, strict=True)
            kept = [torch.where(where, before, now) for before, now in pairs]
        torch._foreach_copy_(self.buffers, kept)
