"""The position of a run, which the loop keeps up to date and checkpoints keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from drivetrain.training.step_guard import Recent


@dataclass
class Progress:
    """The position of the run: what a checkpoint keeps beside the engine's state."""

    step: int = 0
    updates: int = 0  # steps that were not skipped
    samples: int = 0
    tokens: int = 0  # that the samples had, padding left out; up to the last point of the curve
    elapsed_seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    evaluations_without_gain: int = 0
    last_evaluation: int = 0
    last_save: int = 0
    recent: Recent = field(default_factory=Recent)
    terms: dict[str, float] = field(default_factory=dict)  # of the loss, at the last point of the curve
    reduction: dict[str, Any] | None = None  # of the micro-batches, since memory ran out
    by_set: dict[str, dict[str, float]] = field(default_factory=dict)  # loss and metrics on each data set of a mixture

    def __post_init__(self) -> None:
        if isinstance(self.recent, dict):  # as a checkpoint has it
            self.recent = Recent(**self.recent)

    @property
    def skipped(self) -> int:
        return self.step - self.updates

    @property
    def counts(self) -> tuple[int, int]:
        """Returns updates made and steps skipped so far, as the schedule takes them."""
        return self.updates, self.skipped
