"""The data of planned runs, read once for all that have the same."""

from __future__ import annotations

from drivetrain.config.run import RunConfig
from drivetrain.training.assemble import read_workload
from drivetrain.workloads.base import Workload

DECIDES = {"workload", "seed", "adapter", "quantised_base", "quantisation_aware"}


class Samples:
    """The workload of the latest run, kept for the next one if that has the same."""

    def __init__(self) -> None:
        self._key = ""
        self._workload: Workload | None = None

    def hold(self, run: RunConfig, workload: Workload) -> None:
        """Takes a workload that was built for a run already."""
        self._key, self._workload = run.model_dump_json(include=DECIDES), workload

    def of(self, run: RunConfig) -> Workload:
        """Returns the run's workload. Raises UserError where its data or model cannot be read."""
        key = run.model_dump_json(include=DECIDES)
        if self._workload is None or key != self._key:
            self._key, self._workload = key, read_workload(run, training=True)
        return self._workload
