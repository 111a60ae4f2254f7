"""Runs a pipeline stage: micro-batches through torch.distributed.pipelining's schedules, evaluation one by one.

Huang et al. 2019, "GPipe"; Narayanan et al. 2021 (1F1B); Qi et al. 2023, "Zero Bubble Pipeline Parallelism".

A schedule passes one flat tensor of one size between stages. Hidden states are padded to it and cut back, so that
micro-batches of any shape share a window: every stage knows the batches, and the shapes that follow from them
(block_discovery.HiddenShape).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble
from torch.nn import functional as F

from drivetrain.data.loader import MicroBatch
from drivetrain.engines.base import Part, untimed
from drivetrain.engines.mesh.block_discovery import HiddenShape
from drivetrain.engines.mesh.stage_split import Link, Reached
from drivetrain.errors import RunError, UserError
from drivetrain.measure.throughput import Stopwatch
from drivetrain.workloads.base import Batch

Work = Callable[[nn.Module, int], Tensor]  # the model and the number of a micro-batch → its loss, on the last stage
GRAIN = 1024  # numbers; the least that a buffer is rounded up to


class Stage(nn.Module):
    """The part of a model that this rank holds, as the schedule calls it."""

    def __init__(self, model: nn.Module, link: Link) -> None:
        super().__init__()
        self.model = model
        self._link = link
        self._call: Callable[[Tensor, int], Any] | None = None

    def running(self, call: Callable[[Tensor, int], Any]) -> None:
        self._call = call

    def forward(self, given: Tensor, number: Tensor) -> Any:
        """number: (1,), a view of all micro-batches' numbers. given: the received tensor; on the first stage, the
        number again."""
        assert self._call is not None
        return self._call(given, int(number.storage_offset()))  # its place is its number, also while it is only traced


class _TimedStage(PipelineStage):
    """Records when it computes; the rest of a window it waits for other stages."""

    def __init__(self, *args: Any, at_work: Callable[[str], AbstractContextManager[None]], **kwargs: Any) -> None:
        """at_work: surrounds each pass of a micro-batch, which it is given the name of."""
        super().__init__(*args, **kwargs)
        self._at_work = at_work

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._at_work("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._at_work("backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._at_work("backward"):
            return super().backward_weight_one_chunk(*args, **kwargs)


class Pipeline:
    def __init__(
        self,
        model: nn.Module,
        link: Link,
        hidden: HiddenShape,
        *,
        schedule: str,
        group: dist.ProcessGroup,
        device: torch.device,
        transport: torch.dtype,
        length_share: int = 1,
        part: Part = untimed,
    ) -> None:
        """transport: dtype of the tensors between stages. length_share: ranks that hold a part of each sequence between
        blocks. part: surrounds the forward pass of each micro-batch, and the backward pass."""
        self.stage = Stage(model, link)
        self.index, self.count = dist.get_rank(group), dist.get_world_size(group)
        self._link, self._hidden, self._schedule_name = link, hidden, schedule
        self._group, self._device, self._transport, self._length_share = group, device, transport, length_share
        self._part = part
        self._reset()
        self._kept = transport

    def begin(self) -> None:
        """Ends the trial, in which all tensors have the transport dtype: forgets its schedule and its measurements."""
        self._reset()
        self._kept = self._hidden.dtype

    def _reset(self) -> None:
        self._made: tuple[tuple[int, int], Any] | None = None
        self._stopwatch, self._windows, self.most_pieces = Stopwatch(self._device), 0, 0

    @property
    def waiting_share(self) -> float | None:
        """Returns the share of the windows' time in which this stage did not compute: its bubble, and exchanges.

        None before the second window; the first one also connects the stages.
        """
        seconds = self._stopwatch.seconds
        return 1 - seconds["at_work"] / seconds["window"] if self._windows > 1 else None

    def measured(self) -> dict[str, Any]:
        """Returns the share of its windows that this stage waits, and the least that the schedule allows, where it is
        known."""
        least = None if self._schedule_name == "zero_bubble" else bubble(self.count, self.most_pieces)
        return {"stage": self.index, "waiting_share": self.waiting_share, "bubble": least}

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    # --- a window ----------------------------------------------------------------------------------------------------

    def filled(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Adds micro-batches that do not count, if the schedule needs more: as many as stages, or a multiple."""
        have = len(micro_batches)
        wanted = {"gpipe": have, "1f1b": max(have, self.count), "zero_bubble": -(-have // self.count) * self.count}
        missing = wanted[self._schedule_name] - have
        return [*micro_batches, *[MicroBatch(micro_batches[0].tensors, counts=False)] * missing]

    def window(self, batches: Sequence[Batch], loss: Work) -> list[Tensor]:
        """Runs forward and backward of all micro-batches; returns their losses, on the last stage.

        loss: returns the tensor that backward starts from.
        """
        shapes = [self._shape(batch) for batch in batches]
        size = rounded(max(map(math.prod, shapes)))

        def call(given: Tensor, number: int) -> Tensor:
            found: Tensor = self._computed(given, shapes[number], size, lambda model: loss(model, number))
            # backward goes through all stages, also where what comes before them is frozen
            return found if found.requires_grad else found.requires_grad_()

        self.stage.running(call)
        schedule = self._schedule(len(batches), size)
        numbers = torch.arange(len(batches))
        losses: list[Tensor] = []
        first = (numbers,) if self.is_first else ()
        last = {"target": numbers, "losses": losses} if self.is_last else {}
        if self._windows == 1:
            self._stopwatch = Stopwatch(self._device)
        with self._stopwatch.part("window"):
            try:
                schedule.step(*first, number=numbers, return_outputs=False, **last)
            except RuntimeError as error:  # of the schedule, around whatever went wrong in the model
                if isinstance(error.__cause__, RunError | UserError):
                    raise error.__cause__ from None
                raise
        self._windows, self.most_pieces = self._windows + 1, max(self.most_pieces, len(batches))
        return losses

    def _computed(self, given: Tensor, shape: tuple[int, ...], size: int, work: Callable[[nn.Module], Any]) -> Any:
        """Returns the result of `work` on the last stage; on others the tensor for the next stage, padded to `size`
        numbers.

        given: the received tensor; on the first stage, unused.
        """
        self._link.received = None if self.is_first else self._unpacked(given, shape)
        self._link.was_read = self.is_first
        try:
            found, ended = work(self.stage.model), self.is_last
        except Reached as reached:
            found, ended = self._packed(reached.hidden, shape, size), True
        finally:
            self._link.received = None
        if not (ended and self._link.was_read):
            raise RunError("a pipeline stage left out one of its blocks, which then gave the next stage nothing")
        return found

    def _shape(self, batch: Batch) -> tuple[int, ...]:
        samples, *rest = self._hidden.of(batch)
        if self._hidden.length_of is not None:
            rest[0] //= self._length_share
        return (samples, *rest)

    def _packed(self, hidden: Tensor, shape: tuple[int, ...], size: int) -> Tensor:
        if hidden.shape != shape:
            raise RunError(f"a pipeline stage gave {tuple(hidden.shape)} where the batch says {shape}")
        return F.pad(hidden.to(self._transport).flatten(), (0, size - hidden.numel()))

    def _unpacked(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        return flat[: math.prod(shape)].view(shape).to(self._kept)

    def _schedule(self, num_batches: int, size: int) -> Any:
        """Returns a schedule for so many micro-batches and numbers between stages: the last one, or a new one in its
        place."""
        if self._made is None or self._made[0] != (num_batches, size):
            self._made = None  # its buffers are free before there are others
            buffer = torch.empty(size, dtype=self._transport, device="meta", requires_grad=True)
            number, loss = torch.empty(1, dtype=torch.int64, device="meta"), torch.empty((), device="meta")
            stage = _TimedStage(
                self.stage,
                self.index,
                self.count,
                self._device,
                input_args=number if self.is_first else buffer,
                output_args=loss.requires_grad_() if self.is_last else buffer,
                group=self._group,
                at_work=self._at_work,
            )
            self._made = (num_batches, size), _made(self._schedule_name, stage, num_batches)
        return self._made[1]

    @contextmanager
    def _at_work(self, name: str) -> Iterator[None]:
        with self._stopwatch.part("at_work"), self._part(name):
            yield

    # --- evaluation and prediction -----------------------------------------------------------------------------------

    def forward_only(self, batch: Batch, work: Callable[[nn.Module], Any]) -> Any:
        """Runs one batch through all stages; returns the result of `work` on the last, None elsewhere. Stages go on to
        the next batch as soon as they have computed theirs."""
        shape = self._shape(batch)
        size = math.prod(shape)
        received = torch.empty(0 if self.is_first else size, dtype=self._transport, device=self._device)
        if not self.is_first:
            dist.recv(received, group=self._group, group_src=self.index - 1)
        self.stage.running(lambda given, _: self._computed(given, shape, size, work))
        found = self.stage(received, torch.zeros(1, dtype=torch.int64))
        if self.is_last:
            return found
        dist.send(found, group=self._group, group_dst=self.index + 1)
        return None


def _made(name: str, stage: PipelineStage, num_batches: int) -> Any:
    def loss_of(output: Tensor, target: Any) -> Tensor:
        del target  # the stage has computed its loss
        return output

    if name == "gpipe":
        return ScheduleGPipe(stage, num_batches, loss_fn=loss_of, scale_grads=False)
    if name == "1f1b":
        return Schedule1F1B(stage, num_batches, loss_fn=loss_of, scale_grads=False)
    return ScheduleInterleavedZeroBubble([stage], num_batches, loss_fn=loss_of, scale_grads=False)


def rounded(count: int) -> int:
    """Rounds up, by an eighth at most beyond GRAIN: windows of like size then share a schedule."""
    step = max(GRAIN, 2 ** (count.bit_length() - 4))
    return math.ceil(count / step) * step


def bubble(stages: int, micro_batches: int) -> float:
    """Returns the share of a window in which a stage waits, under GPipe and 1F1B with stages of equal cost."""
    return (stages - 1) / (micro_batches + stages - 1)
