"""The newest values of a run's curves in a file that Prometheus' node exporter collects."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from drivetrain.tracking.curves import CurveTracker
from drivetrain.tracking.events import RunStarted

STATUS = ("running", "completed", "stopped_early", "interrupted", "failed")


class PrometheusTracker(CurveTracker):
    """Writes metrics.prom into the run's folder whenever a point is added. A link to it in the exporter's
    --collector.textfile.directory makes a server watch the run."""

    service = "prometheus"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._registry, self._gauges, self._run = CollectorRegistry(), dict[str, Gauge](), ""

    def begin(self, started: RunStarted, record: str | None) -> str:
        del record
        self._run = started.name
        self._set("step", started.first_step)
        self._set("total_steps", started.total_steps)
        self._state("running")
        return started.name

    def add(self, numbers: dict[str, float], step: int) -> None:
        self._set("step", step)
        for name, value in numbers.items():
            self._set(name, value)
        self._write()

    def finish(self, status: str) -> None:
        self._state(status)

    def _state(self, status: str) -> None:
        for name in STATUS:
            self._set(f"status_{name}", float(name == status))
        self._write()

    def _set(self, name: str, value: float) -> None:
        metric = "drivetrain_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        if metric not in self._gauges:
            self._gauges[metric] = Gauge(metric, f"{name} of the run", ["run"], registry=self._registry)
        self._gauges[metric].labels(run=self._run).set(value)

    def _write(self) -> None:
        write_to_textfile(str(self.folder / "metrics.prom"), self._registry)
