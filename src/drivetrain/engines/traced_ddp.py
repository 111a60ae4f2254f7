"""Stands in for DistributedDataParallel while a run is only traced: its reducer cannot take tensors without numbers.

It holds the same memory at each moment. The reducer keeps flat buckets for the whole run. A gradient that backward has
made is copied into its bucket and freed, and the parameter's gradient is a view of the bucket from then on; in passes
that exchange nothing gradients are plain tensors. A bucket whose gradients are there is all-reduced in place.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.config import engines as config

COMPRESSED = {"fp16": torch.float16, "bf16": torch.bfloat16}


class TracedDdp(nn.Module):
    def __init__(self, model: nn.Module, options: config.DdpEngine) -> None:
        super().__init__()
        self.module = model
        self._exchanges = True
        self._compressed = COMPRESSED.get(options.gradient_compression)
        trained = [p for p in reversed(list(model.parameters())) if p.requires_grad]
        self.buckets = [
            torch.empty(sum(p.numel() for p in some), dtype=some[0].dtype) for some in _cut(trained, options)
        ]
        self._views: dict[nn.Parameter, tuple[int, Tensor]] = {}
        for number, (bucket, some) in enumerate(zip(self.buckets, _cut(trained, options), strict=True)):
            for parameter, part in zip(some, bucket.split([p.numel() for p in some]), strict=True):
                self._views[parameter] = number, part.view(parameter.shape)
                parameter.register_post_accumulate_grad_hook(self._arrived)
        self._missing: list[int] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._missing = [0] * len(self.buckets)
        for number, _ in self._views.values():
            self._missing[number] += 1
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._exchanges = False
        try:
            yield
        finally:
            self._exchanges = True

    def _arrived(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        if not self._exchanges:
            return
        number, view = self._views[parameter]
        with torch.no_grad():
            view.copy_(parameter.grad)
        parameter.grad = view
        self._missing[number] -= 1
        if not self._missing[number]:
            self._reduce(self.buckets[number])

    def _reduce(self, bucket: Tensor) -> None:
        if self._compressed is None:
            dist.all_reduce(bucket)
            return
        compressed = bucket.to(self._compressed)
        dist.all_reduce(compressed)
        bucket.copy_(compressed)


def _cut(trained: Sequence[nn.Parameter], options: config.DdpEngine) -> list[list[nn.Parameter]]:
    """Returns the parameters of each bucket, as DDP cuts them after its first backward pass: by the size that it was
    passed, from the last parameter to the first."""
    numbers, _ = dist._compute_bucket_assignment_by_size(list(trained), [int(options.bucket_mb * 2**20)], [], [])
    return [[trained[number] for number in some] for some in numbers]
