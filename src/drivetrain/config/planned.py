"""The figures that a run was planned with, which travel with it to its report."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class PlannedFigures(BaseModel):
    """Predicted, never mixed with measured values. way: the overrides that were chosen. peak_bytes: of the fullest
    rank's tensors."""

    model_config = ConfigDict(frozen=True)

    way: str
    peak_bytes: int
    samples_per_second: float
    micro_batch_size: int
