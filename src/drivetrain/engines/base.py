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
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from drivetrain.config.machine import Machine
from drivetrain.config.precision import Precision
from drivetrain.config.training import Scaler
from drivetrain.data.loader import MicroBatch
from drivetrain.memory.statistics import Statistics
from drivetrain.optim.optimizers import OptimizerFactory
from drivetrain.workloads.base import Batch, Workload
from drivetrain.workloads.metrics import Metric
from drivetrain.workloads.sample_scores import SampleScores

T = TypeVar("T")
State = dict[str, Any]
HeldPart = Literal["parameters", "buffers", "gradients", "optimizer"]
Part = Callable[[str], AbstractContextManager[Any]]  # times what runs within, under a name
# the gradient norm → whether the update is refused: known, or a scalar on the device, to be read without waiting
StepGuard = Callable[[Tensor], bool | Tensor]


def untimed(_: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class EngineOptions:
    """The arguments with which every engine is made."""

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
    traced: bool = False  # tensors have shapes and no numbers (plan): checks that read numbers are left out
    stage_blocks: int | None = None  # that a traced pipeline stage keeps of its own; None: all


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step. `scale` and `skipped` wait for the device if the loss is scaled: read them once
    it has other work to do, after the next window is queued."""

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
        """Whether the step overflowed or was refused; weights and schedule are unchanged."""
        if self.refused or self.scales is None:
            return self.refused
        used, next_one = self.scales()
        return next_one < used


@dataclass(frozen=True)
class Engaged:
    """Evidence that the engine did what its name states."""

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
    term_shares: Tensor | None = None  # (terms,), this rank's shares of the last window's terms, where it has several
    term_names: Sequence[str] = ()
    auxiliary: Mapping[str, Callable[..., Any]]  # the wrapped models beside the trained one, by name
    runs_own_batches = True  # whether each rank may run forward a batch of its own, of any shape, and keep a cache
    counts_samples = True  # False on a rank whose samples another one has as well
    stage_depths: tuple[int, ...] = ()  # blocks of each pipeline stage, those too that a trace leaves out

    @abstractmethod
    def setup(self, workload: Workload, build_optimizer: OptimizerFactory | None) -> None:
        """Builds and wraps the model; makes the optimizer after wrapping (None: for evaluation only).

        Raises RunError if the engine did not engage: a run that requests shards never silently trains replicas.
        """

    @abstractmethod
    def engaged(self) -> Engaged:
        """Returns evidence from the wrapped model, not from the request."""

    @abstractmethod
    def measured(self) -> dict[str, Any]:
        """Returns what only the engine can measure, for this rank's entry in the report."""

    @abstractmethod
    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Runs the whole window and accumulates gradients. Returns this rank's share of the global batch's mean loss
        (scalar, detached, fp32) without waiting for it: `summed` turns it into the loss when it is read.

        Times its parts "forward" and "backward", or "forward_backward" where the two overlap.
        """

    def expect(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Announces the window after the one under way: its beginning may be sent to a GPU meanwhile."""
        del micro_batches

    @property
    def is_alone(self) -> bool:
        """Whether one process trains, so that no other rank waits elsewhere when an error ends a step."""
        return False

    def savepoint(self) -> Callable[[], None] | None:
        """Called before a window: returns a function that undoes it if memory runs out in it. None if only a new start
        can."""
        return None

    @abstractmethod
    def summed(self, losses: Tensor) -> Tensor:
        """Returns shares from forward_backward (any shape), summed over the ranks. All ranks call it together."""

    @abstractmethod
    def optimizer_step(self, lr_factor: float, judge: StepGuard | None = None) -> StepResult:
        """Unscales, clips, updates at lr_factor times the peak rate, clears gradients.

        judge: called once on every rank, before the update where the engine makes it itself.
        """

    @abstractmethod
    def evaluate(
        self, batches: Iterable[MicroBatch], metrics: Mapping[str, Metric], scores: SampleScores | None = None
    ) -> dict[str, float]:
        """Returns mean loss and metrics over all ranks, every sample counted once; the same on each rank. scores: takes
        what each batch of this rank adds to them."""

    @abstractmethod
    def predict(self, batches: Iterable[MicroBatch]) -> Iterator[dict[str, Any]]:
        """Yields one row a sample, in the order of the whole data, on the first rank; none on the others.

        All ranks must exhaust it.
        """

    @abstractmethod
    def without_gradient(self, micro_batches: Sequence[MicroBatch], work: Callable[[nn.Module, Batch], T]) -> list[T]:
        """Returns the result of `work` on the model and each micro-batch, on this rank: log-probabilities, the next
        tokens.

        The model is in evaluation mode, and its mode is restored. All ranks must pass equally many micro-batches.
        """

    @abstractmethod
    def state_dict(self) -> State:
        """Returns {"model", "optimizer", "engine"}, by global parameter names: everything that an exact resume needs.
        If there are any, also "auxiliary": the weights of moved models, by name, and "beside": further state of
        auxiliary models, and the workload's own state.

        It holds this rank's part: tensors that it has whole, and shards of those that are spread. Nothing is gathered
        or copied. All ranks must call it; together they have everything.
        """

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Loads the whole state on every rank; tensors in files are read when they are accessed."""

    @abstractmethod
    def shapes(self) -> dict[str, torch.Size]:
        """Returns the global shape of each weight, without communication."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Returns the model's part of the state: whole tensors, gathered one after the other, on the first rank
        alone."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Returns whole gradients of the last window by parameter name, on every rank (for proofs, between the window
        and its step; still scaled under a scaled precision)."""

    @abstractmethod
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Loads weights only, to evaluate or predict."""

    @abstractmethod
    def load_auxiliary(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Loads weights of moved auxiliary models, by their names, to evaluate beside them."""

    @abstractmethod
    def held_tensors(self) -> dict[HeldPart, list[Tensor]]:
        """Returns everything this rank holds between steps, and gradients where there are any, by what it serves (for
        measuring memory). The engine's own buffers of gradients count as gradients."""

    def tensors(self) -> list[Tensor]:
        """Returns the same without distinction."""
        return [tensor for tensors in self.held_tensors().values() for tensor in tensors]

    @abstractmethod
    def save_assets(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Writes the files beside the weights: the workload's, and adapters in the form that other software reads."""

    @abstractmethod
    def check_base(self, folder: Path) -> list[str]:
        """Raises UserError if a checkpoint's adapters are of another base than this model's, or would compute something
        else. Returns remarks for the user."""

    @abstractmethod
    def close(self) -> None: ...
