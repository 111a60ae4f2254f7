"""All meters of one run behind one object: the loop reports what it is doing, the meters count.

A failing meter never ends a run: its figure is left out, and one warning has the reason.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from drivetrain.config.machine import Machine
from drivetrain.config.precision import Precision
from drivetrain.data.loader import MicroBatch
from drivetrain.distributed.communicator import Communicator
from drivetrain.measure.flops import FlopCount
from drivetrain.measure.matmul import matmul_rate
from drivetrain.measure.memory import RecentMemory, TensorPeak, reset_peaks
from drivetrain.measure.observer import Observer
from drivetrain.measure.throughput import Stopwatch, Throughput
from drivetrain.measure.traffic import Traffic
from drivetrain.measure.utilisation import UtilisationSampler, joined
from drivetrain.runtime.heartbeat import SHOWN

T = TypeVar("T")
LOG = logging.getLogger(__name__)
WARM_UP_STEPS = 3  # not steady: caches, allocator and workers fill
NOT_TRAINING = ("evaluation", "samples", "save")  # parts left out of the rate
INSTRUMENTED_STEP = 0  # the first: the optimizer's state does not yet fill the memory that looking takes
MOST_HELD = 0.4  # of the machine's memory, in which every operator of a step is looked at


class Holder(Protocol):
    def tensors(self) -> list[Tensor]: ...


class Meters:
    """Times, memory, utilisation and FLOPs from `__enter__` to `__exit__`."""

    def __init__(
        self,
        machine: Machine,
        precision: Precision,
        holder: Holder,
        instrument: bool,
        stopwatch: Stopwatch,
        warn: Callable[[str], None] = LOG.warning,
    ) -> None:
        """holder: the object that holds the tensors that live between steps. instrument: count FLOPs, tensor memory and
        traffic in one step (torch.compile'd code cannot be seen into). stopwatch: the one that the engine times its
        parts with. warn: gets a sentence about each meter that fails."""
        self._device = torch.device(machine.device)
        self._dtype, self._memory = getattr(torch, precision.compute), machine.memory_bytes
        self._holder, self._instrument = holder, instrument
        self._stopwatch, self._throughput = stopwatch, Throughput()
        self._sampler = UtilisationSampler(self._device)
        self._recent_memory = RecentMemory(self._device)
        self._steps, self._is_timed = 0, False  # whether the step under way is in the rate already
        self._elements = self.samples = 0  # of steady and other steps alike, for the share of elements a sample
        self._flops_per_element: float | None = None
        self._sent: dict[str, int] | None = None
        self._peak: TensorPeak | None = None  # at work during the instrumented step
        self._tensors: TensorPeaks | None = None
        self._warn, self._failed = warn, set[str]()

    def __enter__(self) -> None:
        self._tried("peak memory", lambda: reset_peaks(self._device))
        self._sampler.__enter__()
        self._mark = time.perf_counter()
        self._aside = 0.0  # seconds since the mark that are no part of training

    def __exit__(self, *error: Any) -> None:
        self._sampler.__exit__(*error)
        self._note("utilisation", self._sampler.failure)

    def _tried(self, what: str, measure: Callable[[], T]) -> T | None:
        """Returns the measurement; None, and a warning, where it fails."""
        try:
            return measure()
        except Exception as error:
            self._note(what, error)
            return None

    def _note(self, what: str, failure: Exception | None) -> None:
        if failure is not None and what not in self._failed:
            self._failed.add(what)
            reason = (str(failure).strip().splitlines() or [""])[0][:200]
            self._warn(f"{what} could not be measured and is left out: {type(failure).__name__}: {reason}")

    def begin(self, step: int) -> None:
        """Records that a step begins. step: counted from 1."""
        self._stopwatch.heart.begin(step)

    def batch(self, indices: np.ndarray) -> None:
        """Records the step's samples, once they are known."""
        self._stopwatch.heart.batch(len(indices), indices[:SHOWN].tolist())

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        if name == "optimizer" and self._peak is not None:
            self._peak.begin_phase()
        with self._stopwatch.part(name):
            yield
        if name in NOT_TRAINING:
            self._aside += time.perf_counter() - start

    @contextmanager
    def step(self, micro_batches: list[MicroBatch]) -> Iterator[None]:
        """Surrounds forward, backward and update."""
        elements = sum(next(iter(batch.tensors.values())).numel() for batch in micro_batches)
        if self._instrument and self._steps == INSTRUMENTED_STEP and self._has_room():
            before = self._held()
            with TensorPeak() as memory, FlopCount() as flops, Traffic() as traffic:
                given = [tensor for batch in micro_batches for tensor in batch.tensors.values()]
                self._tried("tensor memory", lambda: memory.track([*self._holder.tensors(), *given]))
                self._peak = memory
                try:
                    yield
                finally:
                    self._peak = None
            found = TensorPeaks(before, self._held(), memory.phases[0], memory.phases[-1])
            self._tensors = self._seen("tensor memory", memory, found)
            self._flops_per_element = self._seen("FLOPs", flops, flops.total / elements)
            self._sent = self._seen("traffic", traffic, traffic.sent)
        else:
            yield
        self._elements += elements

    def _has_room(self) -> bool:
        """Returns whether the machine's memory allows counting every operator: during that, autograd adds up gradients
        out of place, so that the largest one is held three times. Warns if it does not."""
        if self._device.type != "cpu":
            return True
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        held = self._held() * ranks
        if held <= MOST_HELD * self._memory:
            return True
        self._warn(
            f"FLOPs, tensor memory and traffic are not measured: weights and optimizer hold {held / 2**30:.1f} of this "
            f"machine's {self._memory / 2**30:.1f} GiB, and measuring takes some more for one step"
        )
        return False

    def _held(self) -> int:
        """Returns the bytes of tensors that live between steps: the model's, and the optimizer's state once it
        exists."""
        return sum(tensor.nbytes for tensor in self._holder.tensors())

    def _seen(self, what: str, observer: Observer, found: T) -> T | None:
        self._note(what, observer.failure)
        return None if what in self._failed else found

    def step_done(self, samples: int) -> None:
        """Records the end of a step. Evaluation and saving are not counted into the rate."""
        if not self._is_timed:
            self._time(samples)
        self._is_timed = False
        self._steps += 1
        self.samples += samples

    def _time(self, samples: int) -> None:
        now = time.perf_counter()
        seconds = now - self._mark - self._aside
        steady = self._steps >= WARM_UP_STEPS and not (self._instrument and self._steps == INSTRUMENTED_STEP)
        self._throughput.add(samples, seconds, steady=steady)
        self._mark, self._aside = now, 0.0

    def recent_rate(self, samples: int) -> float:
        """Returns the samples a second since the last call, the step that is under way included. samples: its own,
        whose update is made; 0 between steps. What follows until `step_done` counts into the next step's time."""
        if samples:
            self._time(samples)
            self._is_timed = True
        return self._throughput.recent()

    def recent(self) -> dict[str, Any]:
        """Returns what a point of the curve says of the device since the last call: memory and seconds_by_part."""
        return {
            "memory": self._tried("memory", self._recent_memory.look) or {},
            "seconds_by_part": {name: round(seconds, 6) for name, seconds in self._stopwatch.recent().items()},
        }

    def recent_utilisation(self) -> float | None:
        """Returns the share of the device in use since the last call, 0 to 1; None where it is not known."""
        return self._sampler.recent()

    def summary(self, communicator: Communicator) -> dict[str, Any]:
        """Returns the measured fields of a RunReport: for all ranks together, and for each."""
        memory = self._tried("peak memory", self._recent_memory.peaks) or {}
        # after the peaks, to which it would add, and not before the first step, which would wait for it
        yardstick = self._tried("the device's matmul rate", lambda: matmul_rate(self._device, self._dtype))
        if self._tensors is not None and self._device.type == "cpu":
            memory = {"tensor": self._tensors.of_a_step(self._held()), **memory}
        flops = None if self._flops_per_element is None else self._flops_per_element * self._elements
        mine = RankSummary(memory, self._sampler.summary(), flops, self._sent, yardstick)
        everyone = communicator.all_gather(mine)
        rate = self._throughput.steady_rate()
        yardsticks = [other.matmul_rate for other in everyone]
        kinds = [kind for kind in memory if all(kind in other.peak_memory for other in everyone)]
        per_sample = None
        if self.samples and all(other.flops is not None for other in everyone):
            per_sample = sum(other.flops or 0 for other in everyone) / self.samples
        return {
            "seconds_by_part": self._stopwatch.seconds,
            "samples_per_second": rate,
            "peak_memory": {kind: max(other.peak_memory[kind] for other in everyone) for kind in kinds},
            "utilisation": joined([other.utilisation for other in everyone], shared=self._device.type == "cpu"),
            "flops_per_sample": per_sample,
            "flops_per_second": per_sample * rate if per_sample is not None and rate is not None else None,
            "matmul_flops_per_second": None if None in yardsticks else sum(filter(None, yardsticks)),
            "ranks": [other.short(rank) for rank, other in enumerate(everyone)],
        }


@dataclass(frozen=True)
class TensorPeaks:
    """Peaks of the first step, in bytes: what lived before and after it; the peak before the update and that within
    it."""

    before: int
    after: int
    computing: int
    updating: int

    def of_a_step(self, held: int) -> int:
        """Returns the peak of a later step, which begins with the optimizer's state.

        held: bytes that live between steps by now: more than after the first step if that step's update was skipped.
        (The scratch memory of an update that is no single kernel is then missing here.)
        """
        return max(self.computing + held - self.before, self.updating + held - self.after)


@dataclass(frozen=True)
class RankSummary:
    """The measurements of one rank."""

    peak_memory: dict[str, int]
    utilisation: dict[str, Any]
    flops: float | None
    sent: dict[str, int] | None
    matmul_rate: float | None

    def short(self, rank: int) -> dict[str, Any]:
        """Returns the row of the report's list of ranks."""
        shares = {key: self.utilisation[key] for key in ("mean", "peak")}
        figures = {"rank": rank, "peak_memory": self.peak_memory, "utilisation": shares}
        return figures if self.sent is None else {**figures, "sent_bytes_per_step": self.sent}
