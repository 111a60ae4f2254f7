"""Draws the path of questions as an SVG that stands by itself: in a page or as a file, on a light or a dark ground."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from html import escape

from drivetrain.plan.questions import NOTHING_FITS, SLOW_LINKS, Box, Path

BOX, LEAF = 330, 250  # widths
GAP_ACROSS, GAP_DOWN, PAD, LINE = 90, 34, 12, 18
CHARACTER, STRONG = 7.0, 7.9  # widths at 13 px, of the widest common sans-serif fonts
STYLE = """
.ink{fill:#1c2330}.soft{fill:#5b6575}.box{fill:#f3f5f9;stroke:#9aa5b8}.leaf{fill:#ffffff;stroke:#9aa5b8}
.on{fill:#e2ecff;stroke:#2b5fc4;stroke-width:2}.end{fill:#dff3e3;stroke:#23783a;stroke-width:2}
.way{stroke:#9aa5b8;fill:none}.taken{stroke:#2b5fc4;stroke-width:2.5;fill:none}.tip{fill:#9aa5b8}.tiptaken{fill:#2b5fc4}
text{font:13px system-ui,sans-serif}.strong{font-weight:600}
@media (prefers-color-scheme: dark){
.ink{fill:#e8ecf4}.soft{fill:#a7b1c2}.box{fill:#222a36;stroke:#5b687c}.leaf{fill:#181e27;stroke:#5b687c}
.on{fill:#1f3357;stroke:#82aaff}.end{fill:#1c3d27;stroke:#6fcf8a}.way{stroke:#5b687c}.taken{stroke:#82aaff}
.tip{fill:#5b687c}.tiptaken{fill:#82aaff}}
"""


def chart(path: Path) -> str:
    """Returns the chart: questions down the left, what a yes leads to on their right, the path in colour."""
    drawing = _Drawing(path)
    body, width = "".join(drawing.parts()), BOX + GAP_ACROSS + LEAF + 2 * PAD
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {drawing.y:.0f}" width="{width}" role="img"'
    title = "The questions that lead to an engine" + (", and this run's way through them" if path.outcome else "")
    return f'{head} aria-label="{title}"><style>{STYLE}</style>{body}</svg>'


class _Drawing:
    def __init__(self, path: Path) -> None:
        self._path, self.y = path, float(PAD)

    def parts(self) -> Iterator[str]:
        for box in self._path.boxes:
            yield from self._question(box)
        yield from self._leaf_below(NOTHING_FITS, taken=self._path.leaf == NOTHING_FITS)
        if self._path.links is not None:
            yield from self._question(self._path.links)
            yield from self._leaf_below(SLOW_LINKS, taken=self._path.links.answer == "no")
        if self._path.outcome:
            yield from self._wide(self._path.outcome)

    def _question(self, box: Box) -> Iterator[str]:
        asked = _wrapped(box.question.text, BOX, STRONG)
        lines, strong = [*asked, *_wrapped(box.figures, BOX)], len(asked)
        height = _height(lines)
        yield _rectangle(PAD, self.y, BOX, height, "on" if box.answer else "box")
        yield _text(PAD, self.y, lines, strong, soft=not box.answer and bool(self._path.outcome))
        middle = self.y + height / 2
        yield _across(middle, "yes", box.answer == "yes")
        yield from self._leaf(box.question.leaf, middle, box.answer == "yes")
        self.y += height
        yield _down(self.y, "no", box.answer == "no")
        self.y += GAP_DOWN

    def _leaf(self, text: str, middle: float, taken: bool) -> Iterator[str]:
        lines = _wrapped(text, LEAF)
        x, top = PAD + BOX + GAP_ACROSS, middle - _height(lines) / 2
        yield _rectangle(x, top, LEAF, _height(lines), "end" if taken else "leaf")
        yield _text(x, top, lines, 0, soft=not taken and bool(self._path.outcome))

    def _leaf_below(self, text: str, taken: bool) -> Iterator[str]:
        lines = _wrapped(text, BOX)
        yield _rectangle(PAD, self.y, BOX, _height(lines), "end" if taken else "leaf")
        yield _text(PAD, self.y, lines, 0, soft=not taken and bool(self._path.outcome))
        self.y += _height(lines) + GAP_DOWN

    def _wide(self, text: str) -> Iterator[str]:
        width = BOX + GAP_ACROSS + LEAF
        lines = _wrapped(text, width, STRONG)
        yield _rectangle(PAD, self.y, width, _height(lines), "end")
        yield _text(PAD, self.y, lines, len(lines), soft=False)
        self.y += _height(lines) + PAD


def _wrapped(text: str, width: int, character: float = CHARACTER) -> list[str]:
    return textwrap.wrap(text, int((width - 2 * PAD) / character), break_long_words=True)


def _height(lines: list[str]) -> int:
    return len(lines) * LINE + 2 * PAD - 4


def _rectangle(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y:.1f}" width="{width}" height="{height}" rx="8"/>'


def _text(x: float, y: float, lines: list[str], strong: int, soft: bool) -> str:
    shown = []
    for number, line in enumerate(lines):
        kind = ("soft" if soft else "ink") + (" strong" if number < strong else "")
        shown.append(f'<text class="{kind}" x="{x + PAD}" y="{y + PAD + LINE * number + 11:.1f}">{escape(line)}</text>')
    return "".join(shown)


def _across(y: float, word: str, taken: bool) -> str:
    start, end = PAD + BOX, PAD + BOX + GAP_ACROSS
    line = f'<path class="{_way(taken)}" d="M{start} {y:.1f}H{end - 8}"/>'
    tip = f'<path class="{_tip(taken)}" d="M{end} {y:.1f}l-9 -5v10z"/>'
    return line + tip + _word(start + GAP_ACROSS / 2 - 14, y - 7, word, taken)


def _down(y: float, word: str, taken: bool) -> str:
    x = PAD + BOX / 2
    line = f'<path class="{_way(taken)}" d="M{x} {y:.1f}v{GAP_DOWN - 8}"/>'
    tip = f'<path class="{_tip(taken)}" d="M{x} {y + GAP_DOWN:.1f}l-5 -9h10z"/>'
    return line + tip + _word(x + 10, y + GAP_DOWN / 2 + 3, word, taken)


def _word(x: float, y: float, word: str, taken: bool) -> str:
    return f'<text class="{"ink strong" if taken else "soft"}" x="{x}" y="{y:.1f}">{word}</text>'


def _way(taken: bool) -> str:
    return "taken" if taken else "way"


def _tip(taken: bool) -> str:
    return "tiptaken" if taken else "tip"
