"""A profile on the screen: where a step's time goes, and what to try next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from drivetrain.cli.profile_run import Profile
from drivetrain.profile.sections import Section, sections

MOST_ROWS = 12  # of a table on the screen; the page has all


def render(found: Profile) -> Group:
    """Returns the profile for a reader."""
    seen = found.as_object()
    parts: list[RenderableType] = []
    for section in sections(seen):
        parts += [_table(section), Text()]
    return Group(*parts, *_next(seen))


def _table(section: Section) -> Table:
    rows = section.rows[:MOST_ROWS]
    left_out = len(section.rows) - len(rows)
    caption = f"{left_out} more on the page" if left_out else None
    table = Table(title=section.title, caption=caption, box=None, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    for number, name in enumerate(section.columns):
        table.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _next(seen: dict[str, Any]) -> Sequence[Text]:
    if not seen["suggestions"]:
        return [Text("What to try next: nothing that should save 3 % of a step was found.", style="bold")]
    return [Text("`--try` measures the first three.")] if not seen["trials"] else []
