"""Sums gradients of replicas over their ranks in buckets, from within backward.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2. Unlike
DistributedDataParallel it wraps nothing, takes sharded parameters, and need not know which backward is the last: a
schedule of a pipeline may run them in any order, and a zero-bubble one past the hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.engines.state import local_part, place_gradient
from drivetrain.memory.transfers import sent

BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's; the first bucket is smaller there too, to begin early
FIRST_BUCKET_BYTES = 2**20


class _Bucket:
    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters, self._group = parameters, group
        self.missing = 0  # gradients that the window has not completed yet
        self._sums: Tensor | None = None
        self._work: dist.Work | None = None

    def start(self) -> None:
        """Starts the sum. Parameters without a gradient take part with zeros; the numbers at the end state which ranks
        had one."""
        for parameter in self.parameters:
            place_gradient(parameter)
        like = local_part(self.parameters[0])
        parts = [
            torch.zeros_like(local_part(p)).flatten() if p.grad is None else local_part(p.grad).flatten()
            for p in self.parameters
        ]
        have = sent(torch.tensor([float(p.grad is not None) for p in self.parameters]), like.device, like.dtype)
        self._sums = torch.cat([*parts, have])
        self._work = dist.all_reduce(self._sums, group=self._group, async_op=True)

    @property
    def is_done(self) -> bool:
        """Returns whether its sums are complete, so that reading them does not wait."""
        return self._work is not None and self._work.is_completed()

    def finish(self) -> None:
        assert self._work is not None
        assert self._sums is not None
        self._work.wait()
        sizes = [local_part(p).numel() for p in self.parameters]
        *sums, have = self._sums.split([*sizes, len(sizes)])
        for number, (parameter, summed) in enumerate(zip(self.parameters, sums, strict=True)):
            if parameter.grad is not None:
                local_part(parameter.grad).copy_(summed.view(local_part(parameter).shape))
            elif have[number] > 0:  # asks the device, but only where a rank left a parameter out
                parameter.grad = torch.zeros_like(parameter)
                local_part(parameter.grad).copy_(summed.view(local_part(parameter).shape))
        self._work = self._sums = None


class GradientSum:
    """Sums the gradients of a model's trained parameters over a group. All its ranks must have the same parameters in
    the same order."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._buckets = [_Bucket(some, group) for some in _bucketed(p for p in parameters if p.requires_grad)]
        self._started = self._finished = 0
        self._left: dict[nn.Parameter, int] = {}
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def expect(self, backwards: int) -> None:
        """Begins a window, in which gradients arrive at most so often."""
        self._left = dict.fromkeys(self._bucket_of, backwards)
        self._started = self._finished = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def _arrived(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if not self._left:
            return
        self._left[parameter] -= 1
        if self._left[parameter]:
            return
        self._bucket_of[parameter].missing -= 1
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            self._buckets[self._started].start()  # in one order, as on every rank
            self._started += 1
        while self._finished < self._started and self._buckets[self._finished].is_done:
            self._buckets[self._finished].finish()  # its copy of the gradients goes while backward goes on
            self._finished += 1

    def finish(self) -> None:
        """Ends the window: its gradients are sums over the ranks."""
        for bucket in self._buckets[self._started :]:
            bucket.start()
        for bucket in self._buckets[self._finished :]:
            bucket.finish()
        self._left = {}


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sums at once, for parameters that have a gradient on all ranks of the group or on none."""
    gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    sums = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(sums, group=group)
    for gradient, summed in zip(gradients, sums.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view(gradient.shape))


def _bucketed(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divides parameters into buckets, roughly in the order in which backward completes them: from the last to the
    first."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed(list(parameters)):
        size = local_part(parameter).numel() * parameter.element_size()
        if not buckets or size > room or buckets[-1][0].dtype != parameter.dtype:
            room = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
            buckets.append([])
        buckets[-1].append(parameter)
        room -= size
    return buckets
