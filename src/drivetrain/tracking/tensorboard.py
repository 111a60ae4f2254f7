"""Curves for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drivetrain.errors import problem
from drivetrain.tracking.events import Evaluated, Event, Generated, RunStarted, StepDone, Tracker


class TensorBoardTracker(Tracker):
    """Scalars under train/ and evaluation/ in the run's tensorboard folder."""

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
            case StepDone():
                for name in ("loss", "grad_norm", "lr", "samples_per_second"):
                    self._writer.add_scalar(f"train/{name}", getattr(event, name), event.step)
                for name, value in event.terms.items():
                    self._writer.add_scalar(f"train/loss_{name}", value, event.step)
                if event.scale is not None:
                    self._writer.add_scalar("train/scale", event.scale, event.step)
                    self._writer.add_scalar("train/skipped_steps", event.skipped_steps, event.step)
            case Evaluated():
                for name, value in event.metrics.items():
                    self._writer.add_scalar(f"evaluation/{name}", value, event.step)

            case Generated():
                for number, sample in enumerate(event.samples, start=1):
                    texts = [f"**{name}**\n\n{text}" for name, text in sample.items() if text is not None]
                    self._writer.add_text(f"samples/{number}", "\n\n".join(texts), event.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
