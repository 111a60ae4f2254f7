"""The engine contract, and the order in which a model is wrapped.

One loop drives every engine. `forward_backward` takes the whole accumulation window, so that pipeline schedules and
DeepSpeed's own accumulation stay out of the loop, and divides each loss sum by the valid targets of the *global* batch,
so that neither micro-batches nor ranks change the result.

The wrap order, the same for every engine:

    build → adapters → cut stage → tensor parallel → to device and dtype → recompute → compile → offload
          → shard or replicate → optimizer
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from drivetrain.config.machine import Machine
from drivetrain.config.precision import Precision
from drivetrain.config.training import Scaler
from drivetrain.data.loader import MicroBatch
from drivetrain.memory.statistics import Statistics
from drivetrain.optim.optimizers import OptimizerFactory
from drivetrain.workloads.base import Workload
from drivetrain.workloads.metrics import Metric

State = dict[str, Any]
Part = Callable[[str], AbstractContextManager[Any]]  # times what runs within, under a name
# the gradient norm → whether the update is refused: known, or a scalar on the device that nobody should wait for
StepGuard = Callable[[Tensor], bool | Tensor]


def untimed(_: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class EngineOptions:
    """What every engine is made with."""

    precision: Precision
    scaler: Scaler
    machine: Machine
    device: torch.device
    devices: int  # that share a global batch
    max_grad_norm: float | None
    recompute: bool | Literal["selective"]
    compile: bool | Literal["blocks"]  # "blocks": where there are alike ones
    part: Part = untimed
    offload_activations: bool = False


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step gives. `scale` and `skipped` wait for the device where the loss is scaled: ask for them
    once it has other work to do, after the next window is queued."""

    grad_norm: Tensor  # scalar: the global norm before clipping, unscaled
    refused: bool  # no update was made, as the host knows
    held: bool = False  # the judge's answer is on the device, and where it is true nothing was updated
    scales: Callable[[], Sequence[float]] | None = None  # the loss scale that this step used, and the next one's

    @property
    def scale(self) -> float | None:
        """The loss scale that this step used."""
        return None if self.scales is None else self.scales()[0]

    @property
    def skipped(self) -> bool:
        """Whether the step overflowed or was refused; weights and schedule stay."""
        if self.refused or self.scales is None:
            return self.refused
        used, next_one = self.scales()
        return next_one < used


@dataclass(frozen=True)
class Engaged:
    """What shows that the engine did what its name says."""

    wrapper: str  # type of the module that runs forward
    world_size: int
    local_parameters: int  # elements this rank holds
    global_parameters: int
    trained_parameters: int
    parameter_dtype: str
    emulated: bool = False  # a CPU stand-in computed it
    linear_layers: str | Literal[False] = False  # what was put in place of how many of them
    compiled: str | Literal[False] = False  # how many blocks, or the model


class Engine(ABC):
    """Spreads a workload over devices."""

    data_rank: int  # which slice of the global batch is this rank's
    data_world: int
    random_stream: int  # ranks of one number draw the same dropout
    statistics: Statistics  # BatchNorm's, kept before a window and put back where its update is refused
    compiled: str | Literal[False] = False  # what torch.compile was given
    counts_samples = True  # False on a rank whose samples another one has as well

    @abstractmethod
    def setup(self, workload: Workload, build_optimizer: OptimizerFactory | None) -> None:
        """Build and wrap the model; make the optimizer after wrapping (None: for evaluation only).

        RunError if the engine did not engage: a run that asked for shards never trains replicas in silence.
        """

    @abstractmethod
    def engaged(self) -> Engaged:
        """Looks at the wrapped model, not at what was asked for."""

    @abstractmethod
    def measured(self) -> dict[str, Any]:
        """What only the engine can measure, for this rank's entry in the report."""

    @abstractmethod
    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """The whole window, gradients accumulated. Returns this rank's share of the global batch's mean loss (scalar,
        detached, fp32), which nobody waits for: `summed` makes the loss of it when it is read.

        Times its parts "forward" and "backward", or "forward_backward" where the two overlap.
        """

    def expect(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Tells of the window after the one under way: a GPU may be sent the first of it meanwhile."""
        del micro_batches

    def savepoint(self) -> Callable[[], None] | None:
        """Asked before a window: what takes it back if memory runs out in it. None where only a new start can."""
        return None

    @abstractmethod
    def summed(self, losses: Tensor) -> Tensor:
        """Shares that forward_backward returned (any shape), summed over the ranks. All ranks call it together."""

    @abstractmethod
    def optimizer_step(self, lr_factor: float, judge: StepGuard | None = None) -> StepResult:
        """Unscale, clip, update at lr_factor times the peak rate, clear gradients.

        judge: asked once on every rank, before the update where the engine makes it itself.
        """

    @abstractmethod
    def evaluate(self, batches: Iterable[MicroBatch], metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Mean loss and metrics over all ranks, every sample counted once; the same on each rank."""

    @abstractmethod
    def predict(self, batches: Iterable[MicroBatch]) -> Iterator[dict[str, Any]]:
        """One row a sample, in the order of the whole data, on the first rank; none on the others.

        All ranks must exhaust it.
        """

    @abstractmethod
    def state_dict(self) -> State:
        """{"model", "optimizer", "engine"}, by global parameter names: what going on exactly needs.

        This rank's: tensors that it has whole, and pieces of those that are spread. Nothing is gathered or copied. All
        ranks must call it; together they have everything.
        """

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Takes the whole state on every rank, tensors in files that are read where they are looked at."""

    @abstractmethod
    def shapes(self) -> dict[str, torch.Size]:
        """Global shape of each weight; needs no other rank."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The model's part of the state: whole tensors, gathered one after the other, on the first rank alone."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients of the last window by parameter name, on every rank (for proofs, between the window and its
        step; still scaled under a scaled precision)."""

    @abstractmethod
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Weights only, to evaluate or predict."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Everything this rank holds between steps: parameters, buffers, optimizer state (for measuring memory)."""

    @abstractmethod
    def save_assets(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write what belongs beside the weights: the workload's files, adapters as others read them."""

    @abstractmethod
    def check_base(self, folder: Path) -> list[str]:
        """UserError if a checkpoint's adapters are of another base than this model's, or would compute something else.
        Returns what should be known."""

    @abstractmethod
    def close(self) -> None: ...
