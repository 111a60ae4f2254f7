"""The parts of a loss beside one sum: named terms, statistics of the global batch, models beside the trained one.

The loss of a step is the sum over terms of `weight * sum / count`, where sum and count are of the whole global batch: a
preference term divides by pairs and a language term by tokens, each by its own number, however the batch is cut.

Everything that needs a gradient is one forward pass. A value of the whole global batch that must be known before (a
mean KL, the sorted margins) is a statistic: a pass without gradient over the window's micro-batches, whose results are
summed or gathered over the data ranks and passed to the loss of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

LOSS = "loss"  # the name of a loss's only term
ONE_TERM: Mapping[str, float] = {LOSS: 1.0}

Role = Literal["frozen", "moved", "trained"]


@dataclass(frozen=True)
class Auxiliary:
    """A model beside the trained one, wrapped by the same engine.

    frozen: never changes (a reference, a teacher); a checkpoint names `source` and a digest of its weights.
    moved: follows the model, `reference <- mixing * model + (1 - mixing) * reference` after every `every` steps
    (Gorbatovski et al. 2024, "Learn Your Reference Model", section 3.1); checkpoints hold its weights.
    trained: has parameters that the optimizer updates with the model's (a value head); saved with the model.
    """

    role: Role = "frozen"
    build: Callable[[], nn.Module] | None = None  # None: a copy of the model as it is before the first step
    source: str = "the model as it starts"
    every: int = 1
    mixing: float = 1.0
    precision: str | None = None  # a name of PRECISIONS: what it is kept in and computes in; None: as the trained one


@dataclass(frozen=True)
class Precomputed:
    """Numbers of each sample under the model as it starts, computed once, before training or evaluation.

    folder: where they are kept for later runs. key: a digest of all that decides them but the precision; None on a rank
    that does not have the model's weights. samples: N, as `collate` takes them. width: numbers of a sample. work: gets
    the evaluating model and a batch, returns (B, width). take: receives (N, width) fp32.
    """

    folder: Path
    key: str | None
    samples: Any
    width: int
    work: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    take: Callable[[np.ndarray], None]


@dataclass(frozen=True)
class Partial:
    """One micro-batch's part of a statistic. sums: tensors of any shape, added up over the global batch. rows: one row
    a sample (B, ...), in the micro-batch's order, gathered over the global batch."""

    sums: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Statistics:
    """Statistics of the whole global batch, the same on every rank and for every micro-batch except `own`.

    sums: added up, in fp32. rows: (N, ...) in the order of the global batch of N samples. own: (B,) int64, where this
    micro-batch's samples are among the N.
    """

    sums: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    own: Tensor | None = None


@dataclass(frozen=True)
class LossContext:
    """The arguments of a loss beside the model and its micro-batch.

    auxiliary: name → the wrapped model, called as the model is. Frozen and moved ones run without gradient.
    """

    auxiliary: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    statistics: Statistics = field(default_factory=Statistics)


NO_CONTEXT = LossContext()
