"""The costs of one training step on one rank: what it computes, sends and holds.

A trace fills these in (or formulas derive them from another candidate's trace); the time model turns them into seconds
on a device, and the search compares them. Nothing here depends on a device's speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from drivetrain.plan.timeline import NOTHING, MemoryPart, Timeline

OperationKind = Literal[
    "matmul", "attention", "convolution", "memory", "random", "optimizer", "host", "update_copy", "processor"
]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]


@dataclass(frozen=True)
class Operations:
    """All calls of one kind, dtype and size class in a step: those of like FLOPs, or of like bytes. The last six
    kinds move bytes and compute little. "memory": element-wise operations, norms, copies; "random": dropout masks;
    "optimizer": PyTorch's kernels over many tensors at once, clipping included; "host": copies between a GPU and its
    host, beside which it computes; "update_copy": such copies at the optimizer's update, which the GPU waits for;
    "processor": operations of the host's processor on what it holds for the GPU, which the GPU waits for."""

    kind: OperationKind
    dtype: str  # of the arithmetic, as torch names it without "torch.": "bfloat16"
    calls: int
    flops: float  # of all calls; a multiplication with an addition counts as 2
    bytes: float  # read and written by all calls, each tensor once a call; of copies to a host, those that travel


@dataclass(frozen=True)
class Messages:
    """All collectives of one kind over one mesh axis in a step, as this rank takes part in them."""

    collective: Collective
    axis: str  # "dp", "shard", "tp", "pp", "cp"
    ranks: int  # of the group
    stride: int  # ranks from one member of the group to the next: 1 for neighbours; 8 may cross machines
    calls: int
    bytes: float  # of all calls: the whole tensor that is reduced or results, on one rank


@dataclass(frozen=True)
class StepMemory:
    """The memory of one rank at its peak, in bytes."""

    allocated: int  # tensors alive at once
    reserved: int  # what the allocator holds for them; a trace knows no more than `allocated` (room.with_held)
    parts: Mapping[MemoryPart, int]  # what is alive at the peak; its sum is `allocated`
    timeline: Timeline = NOTHING  # through the second step
    window: int = 0  # of the step's own samples, which are there from its beginning to its end
    host: int = 0  # that its host holds for a GPU, at the most


@dataclass(frozen=True)
class StepCosts:
    """One step of one rank: that of the fullest one.

    by_rank: those of each rank that was traced, the fullest among them, each without others in turn. stage_depths:
    blocks of each stage of a pipeline.
    """

    memory: StepMemory
    operations: tuple[Operations, ...]
    messages: tuple[Messages, ...]
    trained_parameters: int  # of the whole model
    tokens: int | None  # of this step over all ranks, padding included; None for pictures and other samples
    origin: Literal["traced", "derived", "measured"]
    seconds_taken: float  # to find this out
    by_rank: Mapping[int, StepCosts] = field(default_factory=dict)
    stage_depths: tuple[int, ...] = ()

    @property
    def ranks(self) -> Sequence[StepCosts]:
        """Those of each rank that was traced, or else these."""
        return [*self.by_rank.values()] or [self]
