"""The newest values of a run's curves as OpenTelemetry gauges, sent to a collector by OTLP over HTTP."""

from __future__ import annotations

from pathlib import Path

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from drivetrain.tracking.curves import CurveTracker
from drivetrain.tracking.events import RunStarted

STATUS = ("running", "completed", "stopped_early", "interrupted", "failed")


class OpenTelemetryTracker(CurveTracker):
    """Where to send and how often are OpenTelemetry's own variables: OTEL_EXPORTER_OTLP_ENDPOINT (a collector on this
    machine by default), OTEL_EXPORTER_OTLP_HEADERS, OTEL_METRIC_EXPORT_INTERVAL (60,000 ms)."""

    service = "opentelemetry"

    def __init__(self, folder: Path, reader: MetricReader | None = None) -> None:
        """reader: reads the gauges; None: one that sends them to the collector."""
        super().__init__(folder)
        self._reader = reader

    def begin(self, started: RunStarted, record: str | None) -> str:
        del record
        resource = Resource.create({"service.name": "drivetrain", "drivetrain.run": started.name})
        reader = self._reader or PeriodicExportingMetricReader(OTLPMetricExporter())
        self._provider = MeterProvider([reader], resource)
        self._meter = self._provider.get_meter("drivetrain")
        self._set("step", started.first_step)
        self._set("total_steps", started.total_steps)
        self._state("running")
        return started.name

    def add(self, numbers: dict[str, float], step: int) -> None:
        self._set("step", step)
        for name, value in numbers.items():
            self._set(name.replace("/", "."), value)

    def finish(self, status: str) -> None:
        """Sends the last values. A collector that does not answer ends no run."""
        self._state(status)
        self._provider.shutdown()

    def _state(self, status: str) -> None:
        for name in STATUS:
            self._set("status", float(name == status), {"status": name})

    def _set(self, name: str, value: float, attributes: dict[str, str] | None = None) -> None:
        # the SDK returns the same instrument for a name that it has
        self._meter.create_gauge(f"drivetrain.{name}").set(value, attributes)
