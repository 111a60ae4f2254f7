"""Draws what memory is made of, a bar a row, and memory over a step."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from drivetrain.plan.rows import WORDS, Row, gib
from drivetrain.plan.timeline import PARTS, Timeline

WIDTH, NAMES, LINE = 960, 360, 30
MOST_NAME = 50  # characters that NAMES has room for
LEAST_HEIGHT = 0.5  # that a part has somewhere to be seen
SCALE = WIDTH - NAMES - 120
STYLE = """
.ink{fill:#1c2330}.soft{fill:#5b6575}.grid{stroke:#9aa5b8;stroke-dasharray:4 4}.limit{stroke:#b3261e;stroke-width:2}
.parameters{fill:#3567b5}.gradients{fill:#d9822b}.optimizer{fill:#7a4fb3}.activations{fill:#2f8f5b}.buffers{fill:#8a8f99}
.engine{fill:#c2517f}.temporaries{fill:#4aa8b8}.unseen{fill:none;stroke:#8a8f99;stroke-dasharray:3 3}
text{font:13px system-ui,sans-serif}.name{font-size:12px}
@media (prefers-color-scheme: dark){.ink{fill:#e8ecf4}.soft{fill:#a7b1c2}.grid{stroke:#5b687c}.limit{stroke:#ff8a80}
.parameters{fill:#7aa5ef}.gradients{fill:#f0a75c}.optimizer{fill:#b48ff0}.activations{fill:#6cc795}.engine{fill:#ea86b0}
.temporaries{fill:#7fd3e0}}
"""


def bars(rows: Sequence[Row]) -> str:
    """Returns a bar for each row with known memory, its parts in colour, the device's memory as a line."""
    known = [row for row in rows if row.costs is not None]
    largest = max((max(row.needed or 0, row.capacity) for row in known), default=1)
    there = {part for row in rows if row.costs is not None for part, size in row.costs.memory.parts.items() if size}
    body, y = [_legend([part for part in PARTS if part in there])], 44
    for row in known:
        body += _bar(row, y, SCALE / largest)
        y += LINE
    return _svg("".join(body), WIDTH, y + 8, "What a device's memory is made of")


def _legend(parts: Sequence[str]) -> str:
    """Returns the colours of the parts that are in the picture."""
    x, found = 0, []
    for name in parts:
        words = WORDS.get(name, name)
        found.append(f'<rect class="{name}" x="{x}" y="6" width="12" height="12" rx="2"/>')
        found.append(f'<text class="ink" x="{x + 17}" y="17">{words}</text>')
        x += 34 + round(len(words) * 6.6)
    return "".join(found)


def _bar(row: Row, y: float, scale: float) -> list[str]:
    assert row.costs is not None
    memory, x = row.costs.memory, float(NAMES)
    name = " ".join(row.overrides)
    label = name if len(name) <= MOST_NAME else name[: MOST_NAME - 3] + "..."
    found = [f'<text class="ink name" x="0" y="{y + 15}">{escape(label)}<title>{escape(name)}</title></text>']
    for part in PARTS:
        size = memory.parts.get(part, 0) * scale
        if size:
            title = f"<title>{WORDS.get(part, part)}: {gib(size / scale)}</title>"
            found.append(f'<rect class="{part}" x="{x:.1f}" y="{y}" width="{size:.1f}" height="20">{title}</rect>')
            x += size
    beside = (memory.reserved - memory.allocated + row.unseen[1]) * scale
    if beside > 1:
        title = "<title>what the allocator holds, and what no trace sees, at most</title>"
        found.append(f'<rect class="unseen" x="{x:.1f}" y="{y}" width="{beside:.1f}" height="20">{title}</rect>')
        x += beside
    limit = NAMES + row.capacity * scale
    found.append(f'<path class="limit" d="M{limit:.1f} {y - 4}v28"/>')
    found.append(f'<text class="soft" x="{max(x, limit) + 8:.1f}" y="{y + 15}">at most {gib(row.needed or 0)}</text>')
    return found


def memory_over_a_step(timeline: Timeline) -> str:
    """Returns the parts of memory one upon another, moment after moment. Empty without moments."""
    if len(timeline.phases) < 2:
        return ""
    height, top, left = 200.0, 60.0, 80.0
    allocated, peak = timeline.allocated, timeline.peak
    highest = max(1, int(allocated[peak]))
    across = (WIDTH - left - 20) / (len(timeline.phases) - 1)
    xs = [left + across * moment for moment in range(len(timeline.phases))]
    seen = [(part, sizes) for part, sizes in zip(PARTS, timeline.parts.T, strict=True) if sizes.any()]
    visible = [part for part, sizes in seen if sizes.max() * height / highest >= LEAST_HEIGHT]
    body, below = [_legend(visible)], np.zeros(len(xs))
    for part, sizes in seen:
        above = below + sizes
        edges = [top + height * (1 - each / highest) for each in (above, below)]
        title = f"<title>{WORDS.get(part, part)}: at most {gib(int(sizes.max()))}</title>"
        body.append(f'<path class="{part}" d="{_area(xs, *edges)}">{title}</path>')
        below = above
    for share in (0.0, 0.5, 1.0):
        y = top + height * (1 - share)
        body.append(f'<path class="grid" d="M{left} {y}H{WIDTH - 20}"/>')
        body.append(f'<text class="soft" x="0" y="{y + 4}">{gib(highest * share)}</text>')
    body.append(f'<path class="limit" d="M{xs[peak]:.1f} {top - 12}v12"/>')
    side = "end" if xs[peak] > WIDTH / 2 else "start"
    where = xs[peak] + (-6 if side == "end" else 6)
    body.append(f'<text class="ink" x="{where:.1f}" y="{top - 4}" text-anchor="{side}">peak</text>')
    body += _phases(timeline.phases, left, across, top + height)
    return _svg("".join(body), WIDTH, top + height + 40, "Memory over a step, by what it is made of")


def _area(xs: Sequence[float], upper: np.ndarray, lower: np.ndarray) -> str:
    """Returns the outline of what lies between two edges."""
    there = [f"{x:.1f} {y:.1f}" for x, y in zip(xs, upper, strict=True)]
    back = [f"{x:.1f} {y:.1f}" for x, y in zip(xs, lower, strict=True)]
    return "M" + "L".join([*there, *reversed(back)]) + "Z"


def _phases(phases: Sequence[str], left: float, across: float, bottom: float) -> list[str]:
    """Returns the names of phases that are wide enough to be named, where they begin."""
    starts = [n for n, phase in enumerate(phases) if n == 0 or phase != phases[n - 1]]
    found, free = [], 0.0
    for start, end in zip(starts, [*starts[1:], len(phases)], strict=True):
        x, name = left + across * start, phases[start]
        if x >= free and (end - start) * across > 20 and x + 8.0 * len(name) < WIDTH:
            found.append(f'<path class="grid" d="M{x:.1f} {bottom}v8"/>')
            found.append(f'<text class="soft" x="{x + 3:.1f}" y="{bottom + 20}">{escape(name)}</text>')
            free = x + 9.0 * len(name) + 10
    return found


def _svg(body: str, width: float, height: float, title: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{title}">'
    )
    return f"{head}<style>{STYLE}</style>{body}</svg>"
