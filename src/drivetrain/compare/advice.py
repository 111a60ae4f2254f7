"""One sentence: what to choose, and why."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.compare.columns import LOWER_IS_BETTER, deciding_metric
from drivetrain.compare.result_rows import Comparison, Row

AS_GOOD = 0.01  # within this share of the best metric (or within the seeds' spread) two rows are equally good
WORTH_NAMING = 0.05  # relative differences of memory above this are mentioned
STAND_IN = "dp on a CPU, whose replicas are threads; its speed says nothing of GPUs"


def advice(comparison: Comparison) -> str:
    """The quickest of the rows whose deciding metric is as good as the best one's."""
    rows = [row for row in comparison.completed if row.status == "completed" and _rate(row)]
    if not rows:
        return "No row can be recommended: none completed on every seed."
    real = [row for row in rows if not row.is_stand_in]
    if not real:
        return f"No row can be recommended: {STAND_IN}."
    good = _as_good(comparison, real)
    chosen = max(good, key=lambda row: _rate(row) or 0.0)
    said = [f"Choose {chosen.label}", *_reasons(comparison, chosen, rows)]
    sentence = said[0] + (": " + "; ".join(said[1:]) if said[1:] else "") + "."
    if any(report.emulated for row in rows for report in row.reports):
        sentence += " Rows marked emulated have the accuracy of 16-bit hardware but not its time and memory."
    if len(real) < len(rows):
        sentence += f" Not considered: {STAND_IN}."
    return sentence


def _as_good(comparison: Comparison, rows: list[Row]) -> list[Row]:
    metric = deciding_metric(comparison)
    if metric is None:
        return rows
    found = _Metric(metric)
    scored = {row.label: value for row in rows if (value := found.of(row)) is not None}
    if not scored:
        return rows
    best = (min if found.lower else max)(scored.values())
    leaders = [row for row in rows if scored.get(row.label) == best]
    allowed = max(AS_GOOD * abs(best), max(found.spread(row) for row in leaders))
    return [row for row in rows if row.label in scored and abs(scored[row.label] - best) <= allowed]


def _reasons(comparison: Comparison, chosen: Row, rows: list[Row]) -> list[str]:
    reference = comparison.reference
    if len(rows) < 2:
        return ["the only row that completed"]
    if reference is None or reference.is_stand_in:
        return []
    reasons = []
    rate, other = _rate(chosen), _rate(reference)
    if chosen is reference:
        reasons.append("nothing as good is quicker")
    elif rate and other:
        reasons.append(f"{rate / other:.2f} times the samples a second of {reference.label}")
    name = deciding_metric(comparison)
    if name is not None and (value := _Metric(name).of(chosen)) is not None:
        best = (min if _Metric(name).lower else max)(v for row in rows if (v := _Metric(name).of(row)) is not None)
        reasons.append(f"{name} {value:.4f}" + ("" if value == best else f", the best being {best:.4f}"))
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

    def spread(self, row: Row) -> float:
        return row.spread(lambda report: report.metrics.get(self.name)) or 0.0


def _rate(row: Row) -> float | None:
    return row.mean(lambda report: report.samples_per_second)
