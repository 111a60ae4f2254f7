"""The curves of a run as named numbers, and the base of trackers that keep such curves elsewhere."""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Sequence
from math import isfinite
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any

from drivetrain.runtime.atomic_file import write_whole
from drivetrain.runtime.strict_json import dumps
from drivetrain.tracking.events import (
    Evaluated,
    Event,
    MixtureEvaluated,
    RolledOut,
    RunFinished,
    RunStarted,
    StepDone,
    Tracker,
)

RECORDS = "trackers.json"  # in the run's folder: the id of the run's record at each service
PROJECT = "drivetrain"  # of services that group runs, unless their own variable names another


def curves_of(event: Event) -> dict[str, float]:
    """Returns the named numbers of an event: train/loss, evaluation/accuracy, mixture/NAME/loss, ... Empty for events
    that have none."""
    match event:
        case StepDone():
            names = ("loss", "grad_norm", "lr", "samples_per_second", "epoch", "samples")
            found = {f"train/{name}": float(getattr(event, name)) for name in names}
            found |= {f"train/loss_{name}": value for name, value in event.terms.items()}
            found |= {f"device/{name}_bytes": float(value) for name, value in event.memory.items()}
            found |= {f"seconds/{name}": value for name, value in event.seconds_by_part.items()}
            found |= {
                f"device/utilisation_{rank}": share
                for rank, share in enumerate(event.utilisation_by_rank)
                if isfinite(share)
            }
            if event.utilisation is not None:
                found["device/utilisation"] = event.utilisation
            if event.tokens is not None:
                found["train/tokens"] = float(event.tokens)
            if event.scale is not None:
                found |= {"train/scale": event.scale, "train/skipped_steps": float(event.skipped_steps)}
            return found
        case Evaluated():
            return {f"evaluation/{name}": value for name, value in event.metrics.items()}
        case RolledOut():
            return {f"answers/{name}": value for name, value in event.metrics.items()}
        case MixtureEvaluated():
            return {
                f"mixture/{one['name']}/{name}": float(value)
                for one in event.sets
                for name, value in one.items()
                if isinstance(value, int | float)
            }
    return {}


class CurveTracker(Tracker):
    """A tracker that opens a record when the run starts, adds points, and closes the record with the run's outcome.

    The record's id is kept in the run's folder, so that a resumed run goes on in the same record.
    """

    service: str  # the tracker's name in a run file

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._status: str | None = None
        self._is_open = False

    @abstractmethod
    def begin(self, started: RunStarted, record: str | None) -> str:
        """Opens the record, or goes on in the one whose id is given. Returns its id."""

    @abstractmethod
    def add(self, numbers: dict[str, float], step: int) -> None:
        """Adds a point to each of these curves."""

    @abstractmethod
    def finish(self, status: str) -> None:
        """Closes the record. status: completed, stopped_early, interrupted or failed."""

    def handle(self, event: Event) -> None:
        match event:
            case RunStarted():
                known = self._records()
                record = self.begin(event, known.get(self.service) if event.first_step else None)
                self._is_open = True
                if known.get(self.service) != record:
                    write_whole(self.folder / RECORDS, dumps({**known, self.service: record}, indent=2) + "\n")
            case RunFinished():
                self._status = event.status
            case _:
                numbers = curves_of(event)
                if numbers and self._is_open:
                    self.add(numbers, event.step)  # type: ignore[attr-defined]  # events with numbers have a step

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.finish(self._status or "failed")

    def _records(self) -> dict[str, str]:
        path = self.folder / RECORDS
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def settings_of(started: RunStarted) -> dict[str, Any]:
    """Returns what a record notes beside its curves: the run's facts, its length, and the folder that has the rest."""
    return {
        **started.facts,
        "total_steps": started.total_steps,
        "samples_per_epoch": started.samples_per_epoch,
        "folder": started.output,
    }


def has_key(variable: str, files: Sequence[Path], hosts: Sequence[str]) -> bool:
    """Returns whether the user has given a service's key: in the environment, or by the service's own login command,
    which writes it into a netrc file."""
    if os.environ.get(variable):
        return True
    for file in files:
        try:
            known = netrc(str(file)).hosts
        except (OSError, NetrcParseError):
            continue
        if any(host in known for host in hosts):
            return True
    return False
