"""Draws curves as SVG, in the colours that the page gives its classes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from drivetrain.tracking.columns import OF_ANSWERS, Curve, thinned

WIDTH, HEIGHT = 560.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 10.0, 10.0, 34.0
MOST_POINTS = 800  # of a line; more cannot be seen
WEIGHT = 0.9  # of the smoothed line
LEAST_SMOOTHED = 40  # points of a line that is smoothed
NAMES = {
    "loss": "Loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "memory": "Memory, MiB",
    "samples_per_second": "Samples a second",
    "utilisation": "Utilisation",
}
SCALE = {"memory": 2.0**-20}


@dataclass(frozen=True)
class Line:
    """points: x and y, y perhaps NaN, where the line has a gap. look: a class of the page's style."""

    name: str
    look: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    title: str
    svg: str


def charts(curve: Curve) -> list[Chart]:
    """Returns the charts for which a run has numbers: the loss first, then metrics, then what trained it."""
    metrics = dict.fromkeys(name for each in curve.evaluations for name in each["metrics"] if name != "loss")
    found = [
        ("loss", [*_trained(curve, "loss", smooth=True), *_evaluated(curve, "loss", "d1")]),
        *(
            (name, [*_made(curve, name), *_evaluated(curve, name, "d2")])
            for name in dict.fromkeys([*OF_ANSWERS, *metrics])
        ),
        *((name, _trained(curve, name, smooth=name == "grad_norm")) for name in NAMES if name != "loss"),
    ]
    saved = [each["step"] for each in curve.marks if each["kind"] in ("checkpoint", "best")]
    anomalies = [each["step"] for each in curve.marks if each["kind"] == "trouble"]
    return [
        Chart(_title(name), drawn(_title(name), lines, saved, anomalies))
        for name, lines in found
        if any(math.isfinite(y) for line in lines for _, y in line.points)
    ]


def _title(name: str) -> str:
    return NAMES.get(name, name.replace("_", " ").capitalize())


def _trained(curve: Curve, name: str, smooth: bool) -> list[Line]:
    values, steps = curve.columns[name], curve.columns["step"]
    scale = SCALE.get(name, 1.0)
    places = thinned(values, MOST_POINTS)
    raw = [(steps[at], values[at] * scale) for at in places]
    if not smooth or len(values) < LEAST_SMOOTHED:
        return [Line("training", "l0", raw)]
    even = smoothed([value * scale for value in values])
    return [Line("", "l0 raw", raw), Line("training, smoothed", "l0", [(steps[at], even[at]) for at in places])]


def _made(curve: Curve, name: str) -> list[Line]:
    """Returns the line of the batches of answers that were learned from."""
    if name not in OF_ANSWERS:
        return []
    values = array("d", (each["metrics"].get(name, math.nan) for each in curve.rollouts))
    steps = [float(each["step"]) for each in curve.rollouts]
    return [Line("answers", "l0", [(steps[at], values[at]) for at in thinned(values, MOST_POINTS)])] if values else []


def _evaluated(curve: Curve, name: str, look: str) -> list[Line]:
    points = [(each["step"], float(each["metrics"][name])) for each in curve.evaluations if name in each["metrics"]]
    return [Line("evaluation", look, points, dots=True)] if points else []


def smoothed(values: Sequence[float]) -> list[float]:
    """Returns the exponential moving average without the pull towards its beginning (Kingma and Ba 2015, section 3).
    What is not finite leaves a gap."""
    total, share, found = 0.0, 1.0, []
    for value in values:
        if math.isfinite(value):
            total = total * WEIGHT + value * (1 - WEIGHT)
            share *= WEIGHT
            found.append(total / (1 - share))
        else:
            found.append(math.nan)
    return found


def drawn(title: str, lines: Sequence[Line], saved: Sequence[float] = (), anomalies: Sequence[float] = ()) -> str:
    """Returns the drawing. saved, anomalies: steps at which a vertical line stands."""
    finite = [(x, y) for line in lines for x, y in line.points if math.isfinite(y)]
    across = ticks(min(x for x, _ in finite), max(x for x, _ in finite), 6)
    up = ticks(min(y for _, y in finite), max(y for _, y in finite), 5)
    x_of = _place(across[0], across[-1], LEFT, WIDTH - RIGHT)
    y_of = _place(up[0], up[-1], HEIGHT - BOTTOM, TOP)
    body = [_axes(across, up, x_of, y_of)]
    inside = (across[0], across[-1])
    for kind, steps in (("saved", _spread(saved)), ("anomaly", _spread(anomalies))):
        body += [
            f'<path class="{kind}" d="M{x_of(step):.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
            for step in steps
            if inside[0] <= step <= inside[1]
        ]
    body += [_line(line, x_of, y_of) for line in lines]
    label = f"{title}, by step"
    return f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'


def _spread(steps: Sequence[float], most: int = 40) -> Sequence[float]:
    """Returns at most so many steps, evenly among them: lines that touch would hide the curve."""
    return steps if len(steps) <= most else [steps[number * len(steps) // most] for number in range(most)]


def _place(first: float, last: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - first) / ((last - first) or 1.0) * (end - start)


def _axes(
    across: Sequence[float], up: Sequence[float], x_of: Callable[[float], float], y_of: Callable[[float], float]
) -> str:
    found = []
    for value in up:
        y = y_of(value)
        found.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        found.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{figure(value, up)}</text>')
    for value in across:
        x = x_of(value)
        end = ' text-anchor="end"' if x > WIDTH - 30 else ' text-anchor="middle"'
        found.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}"{end}>{figure(value, across)}</text>')
    found.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}" text-anchor="middle">step</text>')
    return "".join(found)


def _line(line: Line, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    places, is_on = [], False
    for x, y in line.points:
        if math.isfinite(y):
            places.append(f"{'L' if is_on else 'M'}{x_of(x):.1f} {y_of(y):.1f}")
        is_on = math.isfinite(y)
    found = f'<path class="{line.look}" d="{"".join(places)}"/>'
    if line.dots or len(places) == 1:
        for x, y in line.points:
            if math.isfinite(y):
                title = f"<title>step {x:g}: {y:.4g}</title>"
                found += f'<circle class="{line.look}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3">{title}</circle>'
    return found


def ticks(low: float, high: float, most: int) -> list[float]:
    """Returns at most `most` + 1 round numbers at equal distances, 1, 2 or 5 times a power of ten, around both ends."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next((times * power for times in (1, 2, 5) if times * power >= rough), 10 * power)
    while math.ceil(high / distance) - math.floor(low / distance) > most:
        distance *= 2
    first, last = math.floor(low / distance), math.ceil(high / distance)
    return [number * distance for number in range(first, last + 1)]


def figure(value: float, among: Sequence[float]) -> str:
    """Returns a tick's number with as many decimals as the distance between ticks needs."""
    largest, distance = max(map(abs, among)), abs(among[1] - among[0])
    if largest and (largest >= 1e6 or largest < 1e-3):
        digits = max(0, math.floor(math.log10(largest)) - math.floor(math.log10(distance)))
        return f"{value:.{digits}e}" if value else "0"
    return f"{value:,.{max(0, -math.floor(math.log10(distance)))}f}"
