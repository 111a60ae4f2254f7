"""Writes a comparison as CSV, JSON and Markdown. Files hold plain units (seconds, bytes, shares), spreads beside the
means."""

from __future__ import annotations

import csv
import io
from typing import Any

from drivetrain.compare.advice import advice, sentences
from drivetrain.compare.figures import Figures
from drivetrain.compare.result_rows import Comparison, Result
from drivetrain.compare.statements import as_data
from drivetrain.runtime.strict_json import dumps


def as_csv(comparison: Comparison) -> str:
    records = _records(comparison)
    keys = list(dict.fromkeys(key for record in records for key in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, keys, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def as_json(comparison: Comparison) -> str:
    """Returns rows with their figures, and for each seed the whole report."""
    rows = [
        {**record, "runs": [_run(result) for result in row.results]}
        for row, record in zip(comparison.rows, _records(comparison), strict=True)
    ]
    everything = {
        "name": comparison.name,
        "verb": comparison.verb,
        "axes": list(comparison.axes),
        "advice": advice(comparison),
        "statements": [as_data(each) for each in sentences(comparison)],  # the advice, for other languages
        "machine": dict(comparison.machine),
        "rows": rows,
    }
    return dumps(everything, indent=1) + "\n"


def as_markdown(comparison: Comparison) -> str:
    """Returns a table with the best figures bold, and the advice below."""
    figures = Figures(comparison)
    head = [*comparison.head, *(column.name for column in figures.columns), "status"]
    lines = [head, [*["---"] * len(comparison.head), *["--:"] * len(figures.columns), "---"]]
    for row in comparison.rows:
        texts = ((column.text(row), figures.is_best(row, column)) for column in figures.columns)
        shown = (f"**{text}**" if is_best else text for text, is_best in texts)
        lines.append([*row.names, *shown, row.status + (f": {row.reason}" if row.reason else "")])
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"# {comparison.name}: {comparison.verb}\n\n{table}\n\n{advice(comparison)}\n"


def _records(comparison: Comparison) -> list[dict[str, Any]]:
    """Returns a flat record a row: its values, its status, then its figures and their spreads over the seeds."""
    figures = Figures(comparison)
    records = []
    for row in comparison.rows:
        record: dict[str, Any] = dict(zip(comparison.head, row.values or (row.label,), strict=True))
        record |= {"status": row.status, "reason": row.reason, "seeds": len(row.results)}
        record["emulated"] = any(report.emulated for report in row.reports)
        for column in figures.columns:
            record[column.key] = column.value(row)
            if (spread := column.spread(row)) is not None:
                record[f"{column.key}_spread"] = spread
        records.append(record)
    return records


def _run(result: Result) -> dict[str, Any]:
    report = None if result.report is None else result.report.model_dump()
    return {"folder": str(result.folder), **result.outcome.model_dump(exclude={"key"}), "report": report}
