"""Fills the page's template: texts and rows of one run, with drawings of its curves. Values of settings that are named
like secrets are left out, since a page is sent to others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from markupsafe import Markup

from drivetrain.config.run import RunConfig
from drivetrain.doctor.secrets import masked, masked_settings
from drivetrain.plan.page_template import rendered
from drivetrain.run_page.charts import charts
from drivetrain.run_page.record import Record, in_sentences
from drivetrain.run_page.remedies import remedies
from drivetrain.tracking.quantities import flops_text, set_text, size_text
from drivetrain.training.report import RunReport

MOST_ROWS = 40  # of evaluations
MOST_WARNINGS = 30
LOG_LINES = 60
MOST_CHARACTERS = 2000  # of a prompt or an answer
# the texts of an answer, and what the page calls them
ANSWER_TEXTS = {
    "prompt": "prompt",
    "answer": "answer",
    "reference_model": "answer of the reference model",
    "reference": "in the data",
}
Rows = list[tuple[str, str]]


def as_html(record: Record) -> str:
    """Returns the page."""
    drawn = charts(record.curve) if record.curve is not None else []
    return rendered(
        "drivetrain.run_page",
        name=record.name,
        status=record.status.replace("_", " "),
        about=_about(record),
        note=masked(record.note),
        failure=_failure(record),
        result=_result(record),
        warnings=[masked(each["message"]) for each in _warnings(record)][-MOST_WARNINGS:],
        plots=[{"title": chart.title, "svg": Markup(chart.svg)} for chart in drawn],
        evaluations=_evaluations(record),
        answers=[_answer(each) for each in reversed(record.answers)],
        changed=_changed(record.config),
        sent=masked_settings(record.sent),
        resolved=masked_settings(record.resolved),
        command=masked(record.command),
        data=_facts(record.report.data if record.report is not None else record.started.get("facts", {})),
        machine=_machine(record.environment),
    )


def _about(record: Record) -> str:
    workload = record.config.get("workload")
    kinds = [workload.get("type"), workload.get("stage")] if isinstance(workload, dict) else []
    engine = record.config.get("engine")
    named = [*kinds, engine.get("name") if isinstance(engine, dict) else engine, record.config.get("precision")]
    started = record.started
    return " · ".join(
        [
            *(str(each) for each in named if each),
            *_starts(record),
            *([f"{_newest(record):,} of {started['total_steps']:,} steps"] if started.get("total_steps") else []),
        ]
    )


def _starts(record: Record) -> list[str]:
    """Returns when the run was started, and when it was last resumed. Of a run with many events the first are not
    known."""
    starts = [each for each in record.events if each["event"] == "run_started"]
    times = [each["time"][:19].replace("T", " ") for each in starts]
    found = [f"started {times[0]} UTC"] if starts and not starts[0].get("first_step") else []
    is_resumed = bool(starts) and bool(starts[-1].get("first_step"))
    return [*found, *([f"resumed {times[-1]} UTC"] if is_resumed else [])]


def _newest(record: Record) -> int:
    """Returns the newest step whose numbers were recorded."""
    steps = record.curve.columns["step"] if record.curve is not None else []
    return int(steps[-1]) if len(steps) else 0


def _failure(record: Record) -> dict[str, Any] | None:
    if not record.is_bad:
        return None
    cause, rest = in_sentences(masked(record.message))
    log = "\n".join(masked(record.log).rstrip().splitlines()[-LOG_LINES:])
    lost = record.status == "lost"
    return {"cause": cause, "rest": rest, "remedies": remedies(record), "log": log, "lost": lost}


def _changed(config: dict[str, Any]) -> Rows:
    """Returns the settings that are not at their defaults, by dotted key. Empty for those of another version of
    drivetrain, which this one cannot read."""
    try:
        found = RunConfig.model_validate(config).model_dump(mode="json", exclude_defaults=True)
    except ValueError:
        return []
    rows = [
        (key, json.dumps(value, ensure_ascii=False)) for key, value in _flat(found) if key not in ("name", "output")
    ]
    return [(key, masked_settings(f"{key}: {text}").removeprefix(f"{key}: ")) for key, text in rows]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _warnings(record: Record) -> list[dict[str, Any]]:
    return [each for each in record.events if each["event"] in ("warning", "trouble")]


def _result(record: Record) -> Rows:
    report = record.report
    if report is None:
        return []
    trained, total = report.engaged.get("trained_parameters"), report.engaged.get("global_parameters")
    shown = {name: text for name, text in report.summary().items() if name != "folder"}
    parts = ", ".join(f"{name.replace('_', ' ')} {value:,.1f} s" for name, value in report.seconds_by_part.items())
    rows = {
        **shown,
        "device": report.device,
        "parameters": "" if total is None else f"{total:,}" + (f", {trained:,} trained" if trained != total else ""),
        "time by part": parts + (f" (since step {report.first_step:,})" if parts and report.first_step else ""),
        "peak memory": ", ".join(f"{size_text(size)} {kind}" for kind, size in report.peak_memory.items()),
        "utilisation": _utilisation(report),
        "model FLOP/s": _flops(report),
        "restarts": "; ".join(report.restarts),
        "mixture": "; ".join(map(set_text, report.mixture)),
        "planned": "" if report.planned is None else report.planned.way,
        "newest checkpoint": report.checkpoint or "none",
    }
    return [(name.replace("_", " "), text) for name, text in rows.items() if text]


def _utilisation(report: RunReport) -> str:
    mean, peak = report.utilisation.get("mean"), report.utilisation.get("peak")
    return "" if mean is None or peak is None else f"mean {mean:.0%}, peak {peak:.0%}"


def _flops(report: RunReport) -> str:
    if report.flops_per_second is None:
        return ""
    share = report.flops_share
    beside = "" if share is None else f", {share:.0%} of what the device reaches on large matrices"
    beside = f", {report.why_no_flops_share}" if report.why_no_flops_share else beside
    return flops_text(report.flops_per_second) + beside


def _evaluations(record: Record) -> dict[str, Any]:
    found = record.curve.evaluations if record.curve is not None else []
    columns = list(dict.fromkeys(name for each in found for name in each["metrics"]))
    rows = [
        {
            "step": f"{each['step']:,}",
            "texts": [f"{each['metrics'][name]:.4f}" if name in each["metrics"] else "" for name in columns],
            "best": each["best"],
        }
        for each in found[-MOST_ROWS:]
    ]
    return {"columns": columns, "rows": rows, "left_out": max(0, len(found) - MOST_ROWS)}


def _answer(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an answer's numbers in a line, and its texts with their names; what a sample lacks is left out."""
    numbers = {name: sample.get(name) for name in ("reward", "advantage")} | dict(sample.get("rewards") or {})
    known = [f"{name} {value:.4g}" for name, value in numbers.items() if isinstance(value, int | float)]
    texts = [(called, _cut(sample[name])) for name, called in ANSWER_TEXTS.items() if sample.get(name)]
    return {"about": " · ".join([f"step {sample.get('step', '?')}", *known]), "texts": texts}


def _cut(text: Any) -> str:
    whole = masked(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False, indent=1))
    return whole if len(whole) <= MOST_CHARACTERS else f"{whole[:MOST_CHARACTERS]} ... ({len(whole):,} characters)"


def _machine(environment: Mapping[str, Any]) -> Rows:
    facts = dict(environment)
    versions, memory, git = (facts.pop(key, None) for key in ("versions", "memory_bytes", "git"))
    rows = _facts(facts)
    if memory:
        rows.append(("memory", f"{memory / 2**30:.1f} GiB"))
    if isinstance(git, dict):
        rows.append(("git commit", f"{git['commit']}{', with changes' if git.get('changed') else ''}"))
    return rows + _facts(versions or {})


def _facts(values: Mapping[str, Any], prefix: str = "") -> Rows:
    return list(_each_fact(values, prefix))


def _each_fact(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name = f"{prefix}{str(key).replace('_', ' ')}"
        if isinstance(value, dict):
            yield from _each_fact(value, f"{name}: ")
        elif name.endswith(" bytes") and isinstance(value, int):
            yield name.removesuffix(" bytes"), size_text(value)
        elif isinstance(value, list | tuple):
            shown = ", ".join(map(str, value[:20])) + (f" and {len(value) - 20} more" if len(value) > 20 else "")
            yield name, masked(shown)
        elif value is not None:
            yield name, masked(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))
