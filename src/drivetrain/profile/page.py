"""A profile as a folder: a page that loads nothing from a server, and all figures as JSON."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from markupsafe import Markup

from drivetrain.plan.page_bars import memory_over_a_step
from drivetrain.plan.page_template import rendered
from drivetrain.plan.timeline import Timeline
from drivetrain.profile.sections import NAMES, milliseconds, sections, shown_parts
from drivetrain.runtime.atomic_file import write_whole, writing
from drivetrain.runtime.strict_json import dumps

WIDTH, LEFT, LINE = 960, 70, 34
COLOURS = ("#3567b5", "#d9822b", "#2f8f5b", "#7a4fb3", "#4aa8b8", "#c2517f")
BETWEEN = "#8a8f99"


def write_page(profile: dict[str, Any], timeline: Timeline, folder: Path, name: str) -> None:
    """Writes profile.html and profile.json. Raises RunError if there is no room.

    profile: as --json prints it. timeline: planned memory over a step; may be empty.
    """
    with writing(folder):
        write_whole(folder / "profile.html", as_html(profile, timeline, name))
        write_whole(folder / "profile.json", dumps(profile, indent=2) + "\n")


def as_html(profile: dict[str, Any], timeline: Timeline, name: str) -> str:
    """Returns the page."""
    first, *others = sections(profile)
    return rendered(
        "drivetrain.profile",
        name=name,
        summary=first,
        bars=Markup(bars(profile["ranks"])),
        sections=others,
        timeline=Markup(memory_over_a_step(timeline)),
        notes=profile["notes"],
        traces=[f"rank-{number}.trace.json.gz" for number in range(len(profile["ranks"]))],
    )


def bars(ranks: list[dict[str, Any]]) -> str:
    """Returns a drawing with a bar a rank: the parts of its step, one after another."""
    names = shown_parts(ranks)
    colours = {part: COLOURS[number % len(COLOURS)] for number, part in enumerate(names)}
    scale = (WIDTH - LEFT - 90) / max(rank["step"] for rank in ranks)
    body, x = list[str](), 0
    for part in [*names, "between the parts"]:
        words = NAMES.get(part, part)
        body.append(f'<rect x="{x}" y="6" width="12" height="12" rx="2" fill="{colours.get(part, BETWEEN)}"/>')
        body.append(f'<text x="{x + 17}" y="17">{escape(words)}</text>')
        x += 34 + round(len(words) * 7)
    for number, rank in enumerate(ranks):
        y, place = 40 + number * LINE, float(LEFT)
        body.append(f'<text x="0" y="{y + 16}">rank {number}</text>')
        lengths = {**rank["parts"], "between the parts": rank["step"] - sum(rank["parts"].values())}
        for part in [*names, "between the parts"]:
            width = max(0.0, lengths.get(part, 0.0)) * scale
            title = f"<title>{escape(NAMES.get(part, part))}: {milliseconds(lengths.get(part, 0.0))}</title>"
            fill = colours.get(part, BETWEEN)
            body.append(f'<rect x="{place:.1f}" y="{y}" width="{width:.1f}" height="22" fill="{fill}">{title}</rect>')
            place += width
        body.append(f'<text x="{place + 8:.1f}" y="{y + 16}">{milliseconds(rank["step"])}</text>')
    height = 48 + len(ranks) * LINE
    label = "The parts of a step, a bar a rank"
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(body)}</svg>'
