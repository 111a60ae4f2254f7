"""Names what a comparison is of: data, model, date and machine, as far as its runs recorded them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from drivetrain.compare.result_rows import Comparison, Result

MOST_NAMES = 3


def title(comparison: Comparison) -> str:
    """Returns a heading: the run, the work, and what differs."""
    work = {"train": "training", "predict": "prediction"}.get(comparison.verb, comparison.verb)
    axes = [axis.rpartition(".")[2] for axis in comparison.axes]
    return f"{comparison.name}: {work}" + (f" by {' and '.join(axes)}" if axes else "")


def subject(comparison: Comparison) -> dict[str, str]:
    """Returns data, model, date and machine of the runs, each if it is known."""
    results = [result for row in comparison.rows for result in row.results if result.report is not None]
    found = {
        "Data": _listed(_data(result) for result in results),
        "Model": _listed(_model(result) for result in results),
        "Date": _days(results),
        "Machine": _machine(comparison, results),
    }
    return {name: text for name, text in found.items() if text}


def _listed(names: Iterator[str]) -> str:
    distinct = list(dict.fromkeys(name for name in names if name))
    more = f" and {len(distinct) - MOST_NAMES} more" if len(distinct) > MOST_NAMES else ""
    return ", ".join(distinct[:MOST_NAMES]) + more


def _data(result: Result) -> str:
    """Returns the training data's name and the number of samples."""
    workload = (result.config or {}).get("workload", {})
    data = workload.get("data") or {}
    sources = data.get("train") or data.get("source") or workload.get("path") or ""
    named = " + ".join(_source(each) for each in (sources if isinstance(sources, list) else [sources]))
    facts = result.report.data if result.report is not None else {}
    counts = [f"{facts[key]:,} {word}" for key, word in _COUNTS if isinstance(facts.get(key), int)]
    return named + (f" ({', '.join(counts)})" if counts else "")


_COUNTS = (("train_samples", "to train on"), ("evaluation_samples", "to evaluate on"))


def _source(given: Any) -> str:
    path = given.get("path", "") if isinstance(given, dict) else given
    return PurePath(str(path)).name or str(path)


def _model(result: Result) -> str:
    """Returns the model's name and the number of its parameters."""
    workload = (result.config or {}).get("workload", {})
    model = workload.get("model") or {}
    config = model.get("config")
    kind = config.get("model_type", "") if isinstance(config, dict) else config or ""
    named = _source(model.get("path") or kind or workload.get("path") or "")
    total = result.report.engaged.get("global_parameters") if result.report is not None else None
    return named + (f" ({total:,} parameters)" if isinstance(total, int) else "")


def _days(results: list[Result]) -> str:
    """Returns the day of the runs, or the first and the last."""
    days = sorted(day for result in results if (day := result.day))
    return "" if not days else days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


def _machine(comparison: Comparison, results: list[Result]) -> str:
    facts = comparison.machine
    named = facts.get("device_name") or _listed(result.report.device for result in results if result.report is not None)
    cores, memory, count = facts.get("cpu_cores"), facts.get("memory_bytes"), facts.get("device_count")
    parts = [f"{count} x {named}" if isinstance(count, int) and count > 1 else named]
    parts += [f"{cores} processor cores"] if cores else []
    parts += [f"{memory / 2**30:.0f} GiB"] if memory else []
    torch = facts.get("versions", {}).get("torch")
    return ", ".join([*parts, *([f"torch {torch}"] if torch else [])])
