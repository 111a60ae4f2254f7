"""A comparison as one HTML page that loads nothing from a server: table, plots, configs, hardware."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from drivetrain.compare.advice import sentences
from drivetrain.compare.columns import Column
from drivetrain.compare.figures import Figures
from drivetrain.compare.plots import COLOURS, INK, PART_COLOURS, as_svg
from drivetrain.compare.result_rows import Comparison, Result, Row
from drivetrain.compare.subject import subject, title

TITLES = {
    "loss": "Training loss, a curve a row",
    "time": "Samples a second",
    "memory": "Peak memory",
    "utilisation": "Utilisation over time",
    "breakdown": "Where the time goes",
}
MOST_CONFIGS = 32  # rows whose whole run file is shown; of the others what differs


def as_html(comparison: Comparison, drawn: dict[str, Figure]) -> str:
    """Returns the page. drawn: the plots, from which the page takes the SVG."""
    template = files("drivetrain.compare").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    figures, (recommendation, *remarks) = Figures(comparison), sentences(comparison)
    deciding = figures.deciding
    others = [column for column in figures.columns if column not in deciding]
    return environment.from_string(template).render(
        title=title(comparison),
        subject=subject(comparison),
        recommendation=recommendation,
        remarks=remarks,
        head=comparison.head,
        tables=[
            _table(comparison, figures, columns) for columns in (deciding, others) if columns or not figures.columns
        ],
        legend=_legend(comparison),
        plots=[(name, TITLES[name], _inline(figure, TITLES[name])) for name, figure in drawn.items()],
        configs=_configs(comparison),
        machine=_machine(comparison),
    )


def _table(comparison: Comparison, figures: Figures, columns: list[Column]) -> dict[str, Any]:
    rows = [
        {
            "names": row.names,
            "status": row.status,
            "reason": row.reason,
            "figures": [
                {"text": c.shown(row), "spread": c.shown_spread(row), "mark": c.mark(row)}
                | {"value": c.value(row), "best": figures.is_best(row, c)}
                for c in columns
            ],
        }
        for row in comparison.rows
    ]
    is_first = columns == figures.deciding
    statuses = is_first and any(row.status != "completed" for row in comparison.rows)
    return {"columns": columns, "rows": rows, "statuses": statuses}


def _legend(comparison: Comparison) -> str:
    """Returns what marks and spreads in the table mean."""
    marked = "Green: not behind the best beyond noise, while another row is."
    seeds = max((len(row.reports) for row in comparison.completed), default=0)
    spread = f"Mean ± standard deviation over {seeds} seeds." if seeds > 1 else "Each row is one run."
    return f"{spread} {marked} A click on a heading sorts."


def _inline(figure: Figure, title: str) -> Markup:
    """Returns the SVG element alone, in the page's text colour, named for screen readers, its size left to the page."""
    svg = as_svg(figure)
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    for number, colour in enumerate((*COLOURS, *PART_COLOURS)):
        svg = svg.replace(colour, f"var(--c{number}, {colour})")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'^(<svg [^>]*?)width="[^"]*" height="[^"]*"|^<svg height="[^"]*" width="[^"]*"', r"\1", svg, count=1)
    return Markup(re.sub("^<svg", f'<svg role="img" aria-label="{title}"', svg, count=1))


def _configs(comparison: Comparison) -> list[dict[str, str]]:
    """Returns for each row's first run that left a config the differences from the reference, and the whole."""
    reference = None if comparison.reference is None else _config(comparison.reference)
    shown: list[dict[str, str]] = []
    for row in comparison.rows:
        config = _config(row)
        if config is not None:
            differs = {key: value for key, value in config.items() if reference is None or reference.get(key) != value}
            whole = "\n".join(f"{key}: {value}" for key, value in config.items())
            shown.append(
                {
                    "label": row.label,
                    "differs": ", ".join(f"{key}: {value}" for key, value in differs.items()) or "the reference",
                    "whole": whole if len(shown) < MOST_CONFIGS else "",
                }
            )
    return shown


def _config(row: Row) -> dict[str, str] | None:
    result: Result = row.results[0]
    return None if result.config is None else dict(_flat(result.config))


def _flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Returns dotted keys; a run's folder always differs, and is left out."""
    found = []
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found += _flat(value, f"{prefix}{key}.")
        elif prefix + key not in {"output", "name"}:
            found.append((prefix + key, json.dumps(value, ensure_ascii=False)))
    return found


def _machine(comparison: Comparison) -> list[tuple[str, str]]:
    facts = dict(comparison.machine)
    versions = facts.pop("versions", {})
    memory = facts.pop("memory_bytes", None)
    shown = [(key.replace("_", " "), _fact(value)) for key, value in facts.items() if value is not None]
    if memory is not None:
        shown.append(("memory", f"{memory / 2**30:.1f} GiB"))
    return shown + [(name, str(number)) for name, number in versions.items()]


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
