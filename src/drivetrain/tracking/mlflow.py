"""Curves in MLflow: on the server that MLFLOW_TRACKING_URI names, or in a database in the run's folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from drivetrain.tracking.curves import PROJECT, CurveTracker, settings_of
from drivetrain.tracking.events import RunStarted

MOST_TEXT = 500  # characters of a parameter's value, which any server takes
STATUS = {"completed": "FINISHED", "stopped_early": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MlflowTracker(CurveTracker):
    """The experiment is MLFLOW_EXPERIMENT_NAME, or drivetrain."""

    service = "mlflow"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        own = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", own))
        self._record = ""

    def begin(self, started: RunStarted, record: str | None) -> str:
        if record is not None:
            self._record = record
            self._client.update_run(record, status="RUNNING")
            return record
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._record = self._client.create_run(number, run_name=started.name).info.run_id
        values = [Param(name, str(value)[:MOST_TEXT]) for name, value in settings_of(started).items()]
        tags = [RunTag("drivetrain.folder", started.output)]  # the artefacts stay where they are: this says where
        self._client.log_batch(self._record, params=values, tags=tags)
        return self._record

    def add(self, numbers: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        points = [Metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._record, metrics=points)

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._record, STATUS.get(status, "FAILED"))
