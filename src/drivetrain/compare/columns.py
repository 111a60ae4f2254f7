"""The columns of a comparison: the value of each, and which end of it is better."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from drivetrain.compare.chance import is_at_chance
from drivetrain.compare.directions import Better, better_end
from drivetrain.compare.noise import ONE_RUN_VARIES
from drivetrain.compare.result_rows import Comparison, Row
from drivetrain.tracking.quantities import rate_text, size_text
from drivetrain.training.report import RunReport

Value = Callable[[RunReport], float | None]

TIME = "wall time of the training loop, evaluation and saving included"
RATE = "samples a second: the steady rate, without first steps, evaluation and saving"
SPEED_UP = "samples a second over the first row's, seed by seed"
UTILISATION = "mean share of the device in use"
PEAK_UTILISATION = "highest share of the device in use"
DIFFERENCE = (
    "largest relative difference of the training loss from the first row's, at the same steps and seed; inf where one "
    "is not finite; none between batches of other sizes"
)
SKIPPED = "steps without an update: fp16-mixed ones that overflowed, and those that numerics.skip left out"
PLANNED_RATE = "samples a second that the plan expected before the run"
PLANNED_PEAK = "peak of tensors that the plan expected, of the rank that needs most"
AGAINST_PLAN = "how far the measured value lies above (+) or below (-) the planned one"
ENERGY = "energy that the devices took, where NVML reports it"
CHANCE = "; chance: no better than always answering the largest class"
METRICS = {
    "accuracy": "share of evaluation samples that are right",
    "loss": "mean loss over the evaluation samples",
    "macro_f1": "mean of the classes' F1, each class counting the same",
    "perplexity": "e to the loss, over target tokens",
}
MEMORY = {
    "allocated": "peak bytes of tensors on the GPU",
    "reserved": "peak bytes that PyTorch's allocator held of the GPU, free ones included",
    "tensor": "peak bytes of tensors in CPU memory",
    "resident": "peak bytes of the process in CPU memory, libraries included",
}
# what one run's memory is taken to vary by: tensors are counted, the process's pages depend on the system
MEMORY_VARIES = {"resident": 0.02}
TENSORS_VARY = 0.002


@dataclass(frozen=True)
class Column:
    """A column. name: for readers. key: for files, with the unit. about: its meaning.

    each: the figure of one run, where rows can be compared by it. varies: the standard deviation that one run is taken
    to have, relative to its figure; None if nothing is known of it.
    """

    name: str
    key: str
    value: Callable[[Row], float | None]
    spread: Callable[[Row], float | None]
    show: Callable[[float], str]
    better: Better | None
    about: str
    each: Value | None = None
    varies: float | None = None
    mark: Callable[[Row], str] = lambda _: ""  # behind a row's value

    def text(self, row: Row) -> str:
        """Returns value, spread and mark; empty if there is no value."""
        spread = self.shown_spread(row)
        return self.shown(row) + (f" ± {spread}" if spread else "") + self.mark(row)

    def shown(self, row: Row) -> str:
        value = self.value(row)
        return "" if value is None else self.show(value)

    def shown_spread(self, row: Row) -> str:
        """Returns the standard deviation over the seeds; empty where there is none."""
        spread = self.spread(row)
        return "" if spread is None else self.show(spread)


def columns_of(comparison: Comparison) -> list[Column]:
    """Returns the columns. Predictions have no length of their own: their data are repeated until enough batches are
    timed."""
    return [
        _time(),
        _of("samples/s", "samples_per_second", lambda r: r.samples_per_second, _number, "high", RATE, ONE_RUN_VARIES),
        _speed_up(comparison),
        *_memory(comparison),
        _of("utilisation", "utilisation_mean", lambda r: r.utilisation["mean"], _share, None, UTILISATION),
        _of("peak utilisation", "utilisation_peak", lambda r: r.utilisation["peak"], _share, None, PEAK_UTILISATION),
        *_planned(),
        *_metrics(comparison),
        _loss_difference(comparison),
        _of("skipped steps", "skipped_steps", _skipped, _number, None, SKIPPED),
        _of("energy", "energy_joules", _energy, _joules, "low", ENERGY, ONE_RUN_VARIES),
    ]


def _of(
    name: str,
    key: str,
    value: Value,
    show: Callable[[float], str],
    better: Better | None,
    about: str,
    varies: float | None = None,
) -> Column:
    def mean(row: Row) -> float | None:
        return row.mean(value)

    def spread(row: Row) -> float | None:
        return row.spread(value)

    return Column(name, key, mean, spread, show, better, about, value, varies)


def _time() -> Column:
    def seconds(report: RunReport) -> float | None:
        return report.seconds if report.verb == "train" else None

    return _of("time", "seconds", seconds, _seconds, "low", TIME, ONE_RUN_VARIES)


def _skipped(report: RunReport) -> float | None:
    return report.skipped_steps if report.verb == "train" else None


def _energy(report: RunReport) -> float | None:
    return report.utilisation.get("energy_joules")


def _speed_up(comparison: Comparison) -> Column:
    """Returns samples a second over the reference row's: seed by seed, then the mean."""
    reference = comparison.reference

    def ratios(row: Row) -> list[float]:
        if reference is None or row is reference:
            return []
        pairs = zip(row.results, reference.results, strict=False)
        rates = [(a.report.samples_per_second, b.report.samples_per_second) for a, b in pairs if a.report and b.report]
        return [mine / other for mine, other in rates if mine and other]

    def mean(row: Row) -> float | None:
        if row is reference:
            return 1.0 if row.mean(lambda r: r.samples_per_second) else None
        found = ratios(row)
        return statistics.fmean(found) if found else None

    def spread(row: Row) -> float | None:
        found = ratios(row)
        return statistics.stdev(found) if len(found) > 1 else None

    return Column("speed-up", "speed_up", mean, spread, lambda v: f"{v:.2f}", None, SPEED_UP)


def _memory(comparison: Comparison) -> list[Column]:
    kinds = dict.fromkeys(kind for row in comparison.completed for report in row.reports for kind in report.peak_memory)

    def of(kind: str) -> Column:
        def peak(report: RunReport) -> float | None:
            return report.peak_memory.get(kind)

        about, varies = f"{MEMORY.get(kind, 'peak memory')}, of the rank that needed most", MEMORY_VARIES.get(kind)
        return _of(f"peak {kind}", f"peak_{kind}_bytes", peak, size_text, "low", about, varies or TENSORS_VARY)

    return [of(kind) for kind in kinds]


def _planned() -> list[Column]:
    """Returns the figures of rows that were planned, and how far the measured ones lie from them."""
    return [
        _of("planned samples/s", "planned_samples_per_second", _planned_rate, _number, None, PLANNED_RATE),
        _of("rate against plan", "rate_against_plan", _rate_against_plan, _signed, None, AGAINST_PLAN),
        _of("planned peak", "planned_peak_bytes", _planned_peak, size_text, None, PLANNED_PEAK),
        _of("peak against plan", "peak_against_plan", _peak_against_plan, _signed, None, AGAINST_PLAN),
    ]


def _planned_rate(report: RunReport) -> float | None:
    return None if report.planned is None else report.planned.samples_per_second or None


def _planned_peak(report: RunReport) -> float | None:
    return None if report.planned is None else report.planned.peak_bytes


def _rate_against_plan(report: RunReport) -> float | None:
    return _against(report.samples_per_second, _planned_rate(report))


def _peak_against_plan(report: RunReport) -> float | None:
    return _against(report.tensor_peak, _planned_peak(report))


def _against(measured: float | None, planned: float | None) -> float | None:
    return measured / planned - 1 if measured and planned else None


def _metrics(comparison: Comparison) -> list[Column]:
    """Returns the last evaluation's metrics; the one that decides comes first."""
    reports = [report for row in comparison.completed for report in row.reports]
    names = dict.fromkeys(name for report in reports for name in report.metrics)
    first = deciding_metric(comparison)
    ordered = sorted(names, key=lambda name: name != first)

    def of(name: str) -> Column:
        better = better_end(reports, name)
        decides = ", which decides" if name == first else ""
        about = f"{METRICS.get(name, 'a metric of the workload')}, at the last evaluation{decides}"
        column = _of(name, name, lambda r: r.metrics.get(name), lambda v: f"{v:.4f}", better, about)
        return replace(column, mark=_chance, about=about + CHANCE) if name == "accuracy" else column

    return [of(name) for name in ordered]


def _chance(row: Row) -> str:
    return " (chance)" if is_at_chance(row) else ""


def deciding_metric(comparison: Comparison) -> str | None:
    reports = [report for row in comparison.completed for report in row.reports]
    return next((report.best["metric"] for report in reports if report.best), None)


def _loss_difference(comparison: Comparison) -> Column:
    difference = functools.cache(comparison.loss_difference)  # reads whole curves
    return Column(
        "loss differs", "largest_loss_difference", difference, lambda _: None, lambda v: f"{v:.1e}", None, DIFFERENCE
    )


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 90 else f"{value / 60:.1f} min"


def _number(value: float) -> str:
    return rate_text(value, 0 if value >= 100 or value == int(value) else 1)


def _share(value: float) -> str:
    return f"{value:.0%}"


def _signed(value: float) -> str:
    return f"{value:+.1%}"


def _joules(value: float) -> str:
    return f"{value:,.0f} J"
