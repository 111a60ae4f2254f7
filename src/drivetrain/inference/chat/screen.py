"""The screen of a chat: Markdown that grows on a terminal, plain text elsewhere."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

try:
    import termios
except ImportError:  # systems that are not POSIX
    termios = None  # type: ignore[assignment]

FENCE = "```"
TABS_AND_LINES = "\n\t"


def visible(text: str) -> str:
    """Returns a model's text without control characters, which could move the cursor or colour the terminal."""
    return "".join(char for char in text if char in TABS_AND_LINES or not (ord(char) < 32 or 127 <= ord(char) < 160))


@contextmanager
def without_echo() -> Iterator[None]:
    """Hides what is typed while replies are drawn, Ctrl-C's ^C too: it would move the cursor, and lines that are drawn
    anew would stay. What was typed is read as the next line. Does nothing where the input is no POSIX terminal."""
    if termios is None:
        yield
        return
    try:
        file = sys.stdin.fileno()
        before = termios.tcgetattr(file)
    except (termios.error, OSError, ValueError):
        yield
        return
    hidden = [*before]
    hidden[3] &= ~termios.ECHO
    termios.tcsetattr(file, termios.TCSADRAIN, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


class Screen(ABC):
    """Receives the replies of models, each at its place. Used as a context while they come."""

    @abstractmethod
    def add(self, place: int, text: str = "", thought: str = "") -> None: ...

    def __enter__(self) -> Screen:
        return self

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None: ...


class PlainScreen(Screen):
    """Writes text as it comes; of several models one after another, under their names. Thoughts are left out."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._console, self._names = console, names
        self._texts = [""] * len(names)

    def add(self, place: int, text: str = "", thought: str = "") -> None:  # noqa: ARG002  of the interface
        self._texts[place] += text
        if len(self._names) == 1 and text:
            self._console.file.write(text)
            self._console.file.flush()

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        if len(self._names) == 1:
            self._console.file.write("\n" if self._texts[0] else "")
        else:
            parts = (f"[{name}]\n{text}\n" for name, text in zip(self._names, self._texts, strict=True))
            self._console.file.write("".join(parts))
        self._console.file.flush()


class MarkdownScreen(Screen):
    """Draws one reply as Markdown. Paragraphs that are complete are printed for good; the last one is drawn anew as it
    grows."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open, self._thought = "", ""
        self._live = Live(console=console, transient=True, refresh_per_second=12, get_renderable=self._drawn)

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def add(self, place: int, text: str = "", thought: str = "") -> None:  # noqa: ARG002  there is one place
        self._thought += visible(thought)
        if text:
            self._end_thought()
        self._open += visible(text)
        complete, self._open = complete_blocks(self._open)
        if complete:
            self._console.print(Markdown(complete))

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self._live.stop()
        self._end_thought()
        if self._open.strip():
            self._console.print(Markdown(self._open))

    def _end_thought(self) -> None:
        if self._thought.strip():
            self._console.print(Text(self._thought.strip(), style="dim italic"))
        self._thought = ""

    def _drawn(self) -> RenderableType:
        if self._thought.strip():
            return Tail(Text(self._thought.strip(), style="dim italic"))
        return Tail(Markdown(self._open)) if self._open.strip() else Text("…", style="dim")


class SideBySide(Screen):
    """Draws the replies of several models beside each other."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._console, self._names = console, names
        self._texts = [""] * len(names)
        self._live = Live(console=console, transient=True, refresh_per_second=8, get_renderable=self._drawn)

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def add(self, place: int, text: str = "", thought: str = "") -> None:  # noqa: ARG002  there is no room for thoughts
        self._texts[place] += visible(text)

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self._live.stop()
        self._console.print(self._table([Markdown(text) for text in self._texts]))

    def _drawn(self) -> RenderableType:
        return self._table([Tail(Markdown(text or "…")) for text in self._texts])

    def _table(self, cells: Sequence[RenderableType]) -> Table:
        table = Table(expand=True)
        for name in self._names:
            table.add_column(name, ratio=1, overflow="fold")
        table.add_row(*cells)
        return table


class Tail:
    """The last lines of something, as many as the terminal has room for."""

    MARGIN = 4  # lines of a table's frame and the cursor's

    def __init__(self, inner: RenderableType) -> None:
        self._inner = Group(inner)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._inner, options, pad=False)
        for line in lines[-max(1, console.height - self.MARGIN) :]:
            yield from line
            yield Segment.line()


def complete_blocks(text: str) -> tuple[str, str]:
    """Splits Markdown behind the last blank line that is outside a fence of code: what stands before it will not change
    any more, except that an item may follow a list, which then is numbered anew only where its numbers are wrong."""
    lines = text.split("\n")
    fenced, place, end = False, 0, 0
    for line in lines[:-1]:
        place += len(line) + 1
        if line.lstrip().startswith(FENCE):
            fenced = not fenced
        elif not line.strip() and not fenced:
            end = place
    following = text[end:].lstrip("\n")
    if not following or following[0] in " \t-*+" or following[:1].isdigit():  # the list may go on
        return "", text
    return text[:end], text[end:]
