"""The picture of the layers: docs/pictures/architecture-light.svg and -dark.svg.

python -m bench.architecture        # writes both
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
THEMES = {
    "light": {"text": "#1f2328", "quiet": "#59636e", "line": "#8c959f", "box": "#f6f8fa", "main": "#ddf4ff"},
    "dark": {"text": "#f0f6fc", "quiet": "#9198a1", "line": "#656c76", "box": "#151b23", "main": "#0c2d6b"},
}
WIDTH, LEFT, ROW, GAP = 860, 20, 104, 12
# from top to bottom: (title, [(folders, what they do, whether a run goes through them)])
LAYERS: list[tuple[str, list[tuple[str, str, bool]]]] = [
    (
        "what you call",
        [
            ("cli", "drivetrain train run.yaml", True),
            ("api", "drivetrain.train(...)", True),
            ("init", "a run file to begin with", False),
        ],
    ),
    (
        "around runs",
        [
            ("launch", "processes, restarts, hangs", True),
            ("compare", "runs side by side", False),
            ("prove", "an engine against one process", False),
            ("importing", "others' configurations", False),
        ],
    ),
    (
        "one run",
        [
            ("training", "one loop for every engine", True),
            ("inference", "evaluate, predict, serve", False),
            ("web", "guards of a server", False),
            ("generation", "prompts answered", False),
        ],
    ),
    (
        "its parts",
        [
            ("engines", "spread it over devices", True),
            ("checkpoint", "save, resume, convert", True),
            ("tracking", "events, files, trackers", True),
            ("workloads", "model, data and loss", True),
        ],
    ),
    (
        "what they stand on",
        [
            ("data", "samples, order, batches", False),
            ("models", "Transformers, adapters", False),
            ("optim, memory", "updates, recompute", False),
            ("numerics", "precisions as dtypes", False),
            ("distributed", "ranks and shards", False),
        ],
    ),
    (
        "without torch",
        [
            ("config", "the run file, and the one place that says whether it works", True),
            ("runtime, trust", "files, locks, hardware; code of strangers", False),
        ],
    ),
]


def picture(theme: str) -> str:
    """The SVG in the colours of a theme, light or dark."""
    colours = THEMES[theme]
    height = ROW * len(LAYERS) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="system-ui, sans-serif">',
        "<title>The layers of Drivetrain: each imports only what stands below it</title>",
    ]
    for number, (title, boxes) in enumerate(LAYERS):
        parts += _layer(title, boxes, 14 + ROW * number, colours)
    note = "Each layer imports only those below. Blue: what drivetrain train passes through."
    parts += [_text(LEFT, height - 12, note, colours["quiet"], 13), "</svg>"]
    return "\n".join(parts) + "\n"


def _layer(title: str, boxes: list[tuple[str, str, bool]], top: int, colours: dict[str, str]) -> list[str]:
    width = (WIDTH - 2 * LEFT - GAP * (len(boxes) - 1)) / len(boxes)
    parts = [_text(LEFT, top + 12, title, colours["quiet"], 13)]
    for place, (name, what, is_main) in enumerate(boxes):
        x, fill = LEFT + place * (width + GAP), colours["main" if is_main else "box"]
        parts.append(
            f'<rect x="{x:g}" y="{top + 20}" width="{width:g}" height="{ROW - 40}" rx="6" fill="{fill}" '
            f'stroke="{colours["line"]}"/>'
        )
        parts.append(_text(x + 10, top + 44, name, colours["text"], 15, "600"))
        parts.append(_text(x + 10, top + 66, what, colours["quiet"], 11.5))
    return parts


def _text(x: float, y: float, words: str, colour: str, size: float, weight: str = "400") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" font-weight="{weight}" fill="{colour}">{escape(words)}</text>'
    )


if __name__ == "__main__":
    for name in THEMES:
        (FOLDER / f"architecture-{name}.svg").write_text(picture(name))
