"""Curves for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drivetrain.errors import problem
from drivetrain.tracking.curves import curves_of
from drivetrain.tracking.events import (
    Evaluated,
    Event,
    Generated,
    MixtureEvaluated,
    RolledOut,
    RunStarted,
    StepDone,
    Tracker,
)


class TensorBoardTracker(Tracker):
    """Scalars under train/, evaluation/ and the names of rewards in the run's tensorboard folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise problem(
                "tracking.trackers", "tensorboard is not installed", "pip install drivetrain[tensorboard]"
            ) from None
        self._open: Any = SummaryWriter
        self._folder = str(folder / "tensorboard")
        self._writer: Any = None

    def handle(self, event: Event) -> None:
        match event:
            case RunStarted():
                # a resumed run hides the points that the killed one wrote past its checkpoint
                self._writer = self._open(self._folder, purge_step=event.first_step + 1 if event.first_step else None)
            case Generated():
                for number, sample in enumerate(event.samples, start=1):
                    texts = [f"**{name}**\n\n{text}" for name, text in sample.items() if text is not None]
                    self._writer.add_text(f"samples/{number}", "\n\n".join(texts), event.step)
            case StepDone() | Evaluated() | MixtureEvaluated() | RolledOut():
                for name, value in curves_of(event).items():
                    self._writer.add_scalar(name, value, event.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
