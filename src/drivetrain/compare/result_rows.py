"""The rows of a comparison: a row a choice, over its seeds, with the difference of its curve from the reference
row's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from drivetrain.compare.outcome import Outcome
from drivetrain.compare.scores import Scores, read_scores
from drivetrain.config.files import read_yaml
from drivetrain.errors import UserError
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.tracking.jsonl import read_events
from drivetrain.training.report import RunReport

Point = tuple[int, int]  # step, samples so far: only runs of one batch size have points in common


@dataclass(frozen=True, eq=False)
class Result:
    """One cell's run. report: None unless the outcome is completed."""

    outcome: Outcome
    folder: Path
    report: RunReport | None

    @classmethod
    def read(cls, outcome: Outcome, folder: Path) -> Result:
        """Reads the result. folder: of the run."""
        if outcome.status != "completed":
            return cls(outcome, folder, None)
        try:
            return cls(outcome, folder, RunReport.read(RunFolder(folder).report))
        except (OSError, ValueError, ValidationError) as error:
            lost = outcome.model_copy(update={"status": "failed", "reason": f"its report cannot be read: {error}"})
            return cls(lost, folder, None)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return list(read_events(self.folder / "events.jsonl"))

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """The resolved run file; None if the run left none."""
        try:
            return read_yaml(RunFolder(self.folder).run_file)
        except UserError:
            return None

    def scores(self, metric: str) -> Scores | None:
        """Returns what each evaluation sample added to a metric; None if the run left no such scores."""
        return read_scores(RunFolder(self.folder).scores, metric)

    @property
    def day(self) -> str:
        """Returns the day on which the run's last event was recorded, as 2026-11-25; empty if none was."""
        times = [event["time"] for event in self.events if isinstance(event.get("time"), str)]
        return times[-1][:10] if times else ""

    def seed(self, otherwise: int) -> int:
        """Returns the run's seed, or `otherwise` if the run left no run file."""
        found = (self.config or {}).get("seed")
        return found if isinstance(found, int) else otherwise

    @cached_property
    def curve(self) -> list[tuple[float, float]]:
        """The points (epoch, training loss): batches of other sizes take other numbers of steps to the same epoch."""
        return [(event["epoch"], event["loss"]) for event in self._steps]

    @cached_property
    def losses(self) -> dict[Point, float]:
        """The training loss at the points of the curve."""
        return {(event["step"], event["samples"]): event["loss"] for event in self._steps}

    @cached_property
    def rates(self) -> list[float]:
        """The samples a second between the points of the curve."""
        found = (event.get("samples_per_second") for event in self._steps)
        return [float(rate) for rate in found if isinstance(rate, int | float)]

    @property
    def _steps(self) -> list[dict[str, Any]]:
        """Returns events of steps with all their numbers: an edited file may lack some."""
        named = ("epoch", "loss", "step", "samples")
        steps = [event for event in self.events if event["event"] == "step"]
        return [event for event in steps if all(isinstance(event.get(name), int | float) for name in named)]


@dataclass(frozen=True, eq=False)
class Row:
    label: str
    values: tuple[str, ...]  # one an axis
    results: tuple[Result, ...]  # one a seed

    @property
    def names(self) -> list[str]:
        """Returns the first cells of the row: its values, or its label; emulated rows are marked."""
        names = list(self.values or (self.label,))
        if any(report.emulated for report in self.reports):
            names[0] += " (emulated)"
        if self.is_stand_in:
            names[0] += " (dp, CPU emulation)"
        return names

    @property
    def reports(self) -> list[RunReport]:
        return [result.report for result in self.results if result.report is not None]

    @property
    def status(self) -> str:
        """Returns completed if every seed did; else the fate of the first that did not."""
        bad = [result.outcome.status for result in self.results if result.report is None]
        if not bad:
            return "completed"
        return bad[0] if len(bad) == len(self.results) else f"{bad[0]} ({len(bad)} of {len(self.results)})"

    @property
    def is_stand_in(self) -> bool:
        """Returns whether a CPU computed it in an engine's place: its results are valid, its time is not."""
        return any(report.engaged.get("emulated") for report in self.reports)

    @property
    def reason(self) -> str:
        return next((result.outcome.reason for result in self.results if result.report is None), "")

    def mean(self, value: Callable[[RunReport], float | None]) -> float | None:
        found = [v for report in self.reports if (v := value(report)) is not None]
        return statistics.fmean(found) if found else None

    def spread(self, value: Callable[[RunReport], float | None]) -> float | None:
        """Returns the standard deviation over the seeds; None for fewer than two, or if one is not finite."""
        found = [v for report in self.reports if (v := value(report)) is not None]
        return statistics.stdev(found) if len(found) > 1 and all(map(math.isfinite, found)) else None


@dataclass(frozen=True, eq=False)
class Comparison:
    """The source of tables, files and the page. The first row that completed is the reference."""

    name: str
    verb: str
    axes: tuple[str, ...]
    rows: tuple[Row, ...]
    machine: Mapping[str, Any] = field(default_factory=dict)  # environment.describe

    @property
    def head(self) -> tuple[str, ...]:
        """The headings of the rows' first cells."""
        return self.axes or ("run",)

    @property
    def reference(self) -> Row | None:
        return next((row for row in self.rows if row.reports), None)

    @property
    def completed(self) -> list[Row]:
        return [row for row in self.rows if row.reports]

    def loss_difference(self, row: Row) -> float | None:
        """Returns the largest relative difference of the training loss from the reference row's, same seed, at common
        steps."""
        reference = self.reference
        if reference is None or row is reference:
            return None
        return largest_difference(
            [(mine.losses, other.losses) for mine, other in zip(row.results, reference.results, strict=False)]
        )


def largest_difference(curves: Sequence[tuple[Mapping[Any, float], Mapping[Any, float]]]) -> float | None:
    """Returns the largest |a - b| / |b| over the steps that both have, infinite if a loss is not finite in one of them
    alone; None if they have none in common."""
    differences = [
        _difference(mine[step], other[step]) for mine, other in curves for step in mine.keys() & other.keys()
    ]
    return max(differences, default=None)


def _difference(mine: float, other: float) -> float:
    if math.isfinite(mine) and math.isfinite(other):
        return abs(mine - other) / max(abs(other), 1e-12)
    return 0.0 if repr(mine) == repr(other) else math.inf
