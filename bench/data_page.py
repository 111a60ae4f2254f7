"""The page of bench/data.py, and the drawing of how time and memory grow with the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tables import markdown_table
from tables import write as write_page

BENCH = Path(__file__).resolve().parent
PAGE, DRAWING = BENCH / "results" / "data.md", BENCH.parent / "docs" / "pictures" / "data-growth.svg"
HEAD = (
    *("data", "rows", "MB", "first start, s", "datasets, s", "ratio", "CPU s", "datasets, CPU s", "CPU ms/1,000 rows"),
    *("second start, s", "CPU s", "datasets, s", "datasets, CPU s"),
    *("memory beyond, GB", "datasets, GB", "disk, MB", "datasets, MB", "processor"),
)


def write(record: Path) -> None:
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    latest = {(line["kind"], line["ranks"], line["rows"]): line for line in lines}
    found = [latest[key] for key in sorted(latest)]
    beside = sorted({line["beside"] for line in found if line["beside"]})
    marks = {each: f" ({chr(ord('a') + place)})" for place, each in enumerate(beside)}
    parts = [
        "# Data of growing sizes",
        "Measured by `bench/data.py`, whose text says how, on two cores and 24 GiB.",
        markdown_table(list(HEAD), [row(line, marks.get(line["beside"], "")) for line in found]),
        *(f"-{mark} Beside it: {each}." for each, mark in marks.items()),
    ]
    write_page(PAGE, "\n\n".join(parts) + "\n")
    draw(found)


def row(line: dict[str, Any], mark: str) -> list[str]:
    """mark: of the note that says what else ran on the machine."""
    first, second = seconds(line, "first"), seconds(line, "second")
    counted = line["baseline"]["cpu_seconds"] is not None  # of processes that ranks started it was not, once
    cpu, again = (seconds(line, which, "cpu_seconds") if counted else None for which in ("first", "second"))
    peers = line.get("peer") or [{}, {}]
    theirs = [each.get("seconds") for each in peers]
    name = line["kind"] + (f", {line['ranks']} ranks" if line["ranks"] > 1 else "")
    return [
        name + mark,
        f"{line['rows']:,}",
        f"{line['bytes'] / 1e6:,.0f}",
        f"{first:.1f}",
        shown(theirs[0]),
        "" if theirs[0] is None else f"{first / theirs[0]:.2f}",
        shown(cpu),
        shown(peers[0].get("cpu_seconds")),
        "" if cpu is None else f"{1e6 * cpu / line['rows']:.0f}",
        f"{second:.1f}",
        shown(again),
        shown(theirs[1]),
        shown(peers[1].get("cpu_seconds")),
        f"{beyond(line) / 1e9:.2f}",
        shown(peers[0].get("beyond_bytes"), 1e9, 2),
        f"{line['disk'] / 1e6:,.0f}",
        shown(line.get("peer_disk"), 1e6, 0),
        line["machine"],
    ]


def seconds(line: dict[str, Any], which: str, kind: str = "seconds") -> float:
    """Returns figures of the first or second start beyond those of the training on few rows."""
    return max(0.0, float(line[which][kind] - line["baseline"][kind]))


def beyond(line: dict[str, Any]) -> float:
    peak = max(line[which]["peak_bytes"] for which in ("first", "second"))
    return max(0.0, float(peak - line["baseline"]["peak_bytes"]))


def shown(value: float | None, unit: float = 1, digits: int = 1) -> str:
    return "" if value is None else f"{value / unit:,.{digits}f}"


def draw(found: list[dict[str, Any]]) -> None:
    """First start and memory over the rows, both axes logarithmic; theirs dashed."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "data"  # the same file for the same figures
    from matplotlib import pyplot

    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    kinds = dict.fromkeys(line["kind"] for line in found if line["ranks"] == 1)
    for number, kind in enumerate(kinds):
        lines = [line for line in found if line["kind"] == kind and line["ranks"] == 1]
        rows, colour = [line["rows"] for line in lines], f"C{number}"
        times.plot(
            rows, [max(0.05, seconds(line, "first", "cpu_seconds")) for line in lines], "o-", color=colour, label=kind
        )
        memory.plot(rows, [beyond(line) / 1e9 for line in lines], "o-", color=colour)
        theirs = [
            (line["rows"], line["peer"][0]) for line in lines if line.get("peer") and "seconds" in line["peer"][0]
        ]
        times.plot([n for n, _ in theirs], [each["cpu_seconds"] for _, each in theirs], "s--", color=colour, alpha=0.5)
        memory.plot(
            [n for n, _ in theirs], [each["beyond_bytes"] / 1e9 for _, each in theirs], "s--", color=colour, alpha=0.5
        )
    times.set(xscale="log", yscale="log", xlabel="rows", ylabel="processor seconds", title="first start")
    memory.set(xscale="log", xlabel="rows", ylabel="GB", title="memory beyond the model's", ylim=(0, None))
    times.legend(fontsize="small")
    for each in (times, memory):
        each.grid(alpha=0.3)
    figure.savefig(DRAWING, metadata={"Date": None})


if __name__ == "__main__":
    write(BENCH / "results" / "data.jsonl")
