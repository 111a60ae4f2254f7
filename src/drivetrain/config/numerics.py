"""The rules of anomalies: which losses and gradients count as such, and the reaction to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from drivetrain.config.base import Frozen, doc
from drivetrain.errors import Problem


class Numerics(Frozen):
    spike_factor: float | None = doc(
        "A loss or gradient norm above so many times its recent median is reported as a spike; null: no report",
        20.0,
        gt=1,
    )
    skip: bool | Literal["spikes"] = doc(
        "Leave out the update of a step whose loss or gradient is not finite, or (spikes) of one that spikes as well; "
        "false: the first that is not finite ends the run",
        False,
    )
    most_skips: int = doc("Steps that may be skipped among any hundred; one more ends the run", 10, gt=0, le=100)
    keep_state: bool = doc(
        "When such a step ends the run, keep weights and optimizer state as they were before it", True
    )

    @property
    def skips_spikes(self) -> bool:
        return self.skip == "spikes"


def numerics_problems(numerics: Numerics) -> Iterator[Problem]:
    if numerics.skips_spikes and numerics.spike_factor is None:
        why = "spikes was given, but numerics.spike_factor=null turns spikes off"
        yield Problem("numerics.skip", why, "give a factor, or numerics.skip=true")
