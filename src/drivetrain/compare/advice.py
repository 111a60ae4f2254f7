"""Recommends in one sentence what to choose, and why."""

from __future__ import annotations

import json
from dataclasses import dataclass

from drivetrain.compare.columns import LOWER_IS_BETTER, deciding_metric
from drivetrain.compare.noise import evaluation_samples, is_beyond_noise, rate_of, standard_error
from drivetrain.compare.result_rows import Comparison, Row

AS_GOOD = 0.01  # within this share of the best metric, the seeds' spread or the standard error rows are equally good
WORTH_NAMING = 0.05  # relative differences of memory above this are mentioned
MODEL = ("path", "config", "tokenizer", "vocabulary_size", "norm")
SAMPLES = (
    "source",
    "registry",
    "train",
    "evaluation",
    "limit_train",
    "limit_evaluation",
)  # keys of data that choose them
ONE_RUN = "Each row is one run: figures that lie near each other may change places; --seeds 3 shows how far they vary."
STAND_IN = "dp on a CPU, whose replicas are threads; its speed does not predict a GPU's"


def advice(comparison: Comparison) -> str:
    """Returns the quickest of the rows whose deciding metric is as good as the best one's, and the reasons.

    If several are equally quick within noise, the first of them: the reference, if it is one.
    """
    if not any(row.status == "completed" for row in comparison.completed):
        return "No row can be recommended: none completed on every seed."
    rows = _ended(comparison)
    if not rows:
        return "No row can be recommended: none ran for enough steps to have a steady rate (samples/s)."
    level = _level(comparison)
    if not level:
        return f"No row can be recommended: {STAND_IN}."
    real = [row for row in rows if not row.is_stand_in]
    said = [f"Choose {level[0].label}", *_reasons(comparison, level[0], rows, level)]
    differing = _differing(rows)
    sentence = said[0] + (": " + "; ".join(said[1:]) if said[1:] else "") + "."
    if differing:
        sentence += f" The rows have different {' and '.join(differing)}: their speeds compare those, not settings."
    if len(real) > 1 and all(len(row.reports) == 1 for row in real):
        sentence += f" {ONE_RUN}"
    if any(report.emulated for row in rows for report in row.reports):
        sentence += " Rows marked emulated have the accuracy of 16-bit hardware but not its time and memory."
    if len(real) < len(rows):
        sentence += f" Not considered: {STAND_IN}."
    return sentence


def _differing(rows: list[Row]) -> list[str]:
    """Returns which of models and data are not the same in all rows, as far as their run files show."""
    workloads = [config.get("workload", {}) for row in rows if (config := row.results[0].config) is not None]
    models = {
        json.dumps(
            [each.get("type"), each.get("path"), *((each.get("model") or {}).get(key) for key in MODEL)], sort_keys=True
        )
        for each in workloads
    }
    data = {json.dumps([(each.get("data") or {}).get(key) for key in SAMPLES], sort_keys=True) for each in workloads}
    return [name for name, found in (("models", models), ("data", data)) if len(found) > 1]


def chosen(comparison: Comparison) -> Row | None:
    """Returns the row that `advice` chooses; None if none can be recommended."""
    return next(iter(_level(comparison)), None)


def _level(comparison: Comparison) -> list[Row]:
    """Returns equally good rows that are as quick as the quickest within noise, in the order of the comparison."""
    good = _as_good(comparison, [row for row in _ended(comparison) if not row.is_stand_in])
    if not good:
        return []
    quickest = max(good, key=lambda row: rate_of(row) or 0.0)
    return [row for row in good if row is quickest or not is_beyond_noise(row, quickest)]


def _ended(comparison: Comparison) -> list[Row]:
    return [row for row in comparison.completed if row.status == "completed" and rate_of(row)]


def _as_good(comparison: Comparison, rows: list[Row]) -> list[Row]:
    metric = deciding_metric(comparison)
    if metric is None:
        return rows
    found = _Metric(metric)
    if all(found.of(row) is None for row in rows):
        return rows
    return [
        row
        for row in rows
        if (value := found.of(row)) is not None and abs(value - found.best(rows)) <= found.allowed(rows)
    ]


def _reasons(comparison: Comparison, chosen: Row, rows: list[Row], level: list[Row]) -> list[str]:
    """Returns the reasons. level: equally good rows that are as quick as the chosen one within noise."""
    reference = comparison.reference
    if len(rows) < 2:
        return ["the only row that completed"]
    if reference is None or reference.is_stand_in:
        return []
    reasons = []
    rate, other = rate_of(chosen), rate_of(reference)
    if len(level) > 1:
        names = ", ".join(row.label for row in level if row is not chosen)
        reasons.append(f"as quick but for noise: {names}")
    elif chosen is reference:
        reasons.append("nothing as good is quicker")
    if chosen is not reference and rate and other:
        reasons.append(f"{rate / other:.2f} times the samples a second of {reference.label}")
    name = deciding_metric(comparison)
    if name is not None and (value := _Metric(name).of(chosen)) is not None:
        quality = f"{name} {value:.4f}" + _Metric(name).beside_the_best(value, rows)
        reasons.insert(0 if _differing(rows) else len(reasons), quality)  # a speed of another model is no reason
    if chosen is not reference:
        reasons += _memory(chosen, reference)
    return reasons


def _memory(chosen: Row, reference: Row) -> list[str]:
    kind = next(iter(chosen.reports[0].peak_memory), None)
    if kind is None:
        return []
    mine, other = (row.mean(lambda report: report.peak_memory.get(kind)) for row in (chosen, reference))
    if not mine or not other or abs(mine / other - 1) < WORTH_NAMING:
        return []
    return [f"{mine / other:.2f} times its peak {kind} memory"]


@dataclass(frozen=True)
class _Metric:
    name: str

    @property
    def lower(self) -> bool:
        return self.name.endswith(LOWER_IS_BETTER)

    def of(self, row: Row) -> float | None:
        return row.mean(lambda report: report.metrics.get(self.name))

    def best(self, rows: list[Row]) -> float:
        """Returns the best mean; at least one row has one."""
        return (min if self.lower else max)(value for row in rows if (value := self.of(row)) is not None)

    def allowed(self, rows: list[Row]) -> float:
        """Returns how far from the best a value may lie and count as equal: the largest of the three kinds."""
        return max(self._by_kind(rows).values())

    def beside_the_best(self, value: float, rows: list[Row]) -> str:
        """Returns a description of a value relative to the best one."""
        best = self.best(rows)
        if value == best:
            return ""
        if abs(value - best) > self.allowed(rows):
            return f", the best being {best:.4f}"
        kind = next(kind for kind, allowed in self._by_kind(rows).items() if abs(value - best) <= allowed)
        return f", equal to the best ({best:.4f}) within {kind}"

    def _by_kind(self, rows: list[Row]) -> dict[str, float]:
        best = self.best(rows)
        leaders = [row for row in rows if self.of(row) == best]
        samples = evaluation_samples(leaders[0])
        return {
            f"the standard error over {samples or 0:,} evaluation samples": max(
                standard_error(row, self.name) for row in leaders
            ),
            "its spread over the seeds": max(self._spread(row) for row in leaders),
            f"{AS_GOOD:.0%}": AS_GOOD * abs(best),
        }

    def _spread(self, row: Row) -> float:
        return row.spread(lambda report: report.metrics.get(self.name)) or 0.0
