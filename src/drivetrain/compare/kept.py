"""Keeps a comparison's results in its folder: rows.json, and the pages of comparisons with other rows.

comparison.* and plots/ are of the newest comparison in the folder. Where it lacks a cell that an earlier one shows, the
earlier one's files go to earlier/<axes>-<hash>/ first, so that no result loses its page.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain.compare.matrix import slug
from drivetrain.compare.outcome import Outcome
from drivetrain.compare.result_rows import Comparison, Result, Row
from drivetrain.config.files import read_json
from drivetrain.errors import problem
from drivetrain.runtime.atomic_file import write_whole

ROWS = "rows.json"
EARLIER = "earlier"
PLOTS = "plots"
KINDS = ("csv", "json", "md", "html")


def files_of(folder: Path) -> list[Path]:
    """Returns the files that a comparison writes into a folder, without rows.json and the cells."""
    return [*(folder / f"comparison.{kind}" for kind in KINDS), folder / PLOTS]


def remember(comparison: Comparison, folder: Path) -> Path | None:
    """Writes rows.json. Returns where an earlier comparison's files went, if they had to make room."""
    rows = [
        {
            "label": row.label,
            "values": row.values,
            "results": [
                {"outcome": result.outcome.model_dump(), "folder": _beside(result.folder, folder)}
                for result in row.results
            ],
        }
        for row in comparison.rows
    ]
    aside = _set_aside(folder, set(_measured(rows)))
    write_whole(folder / ROWS, json.dumps({"name": comparison.name, "axes": comparison.axes, "rows": rows}, indent=1))
    return aside


def remembered(folder: Path) -> list[Row]:
    """Returns the rows of a comparison. Raises UserError if rows.json cannot be read."""
    try:
        kept = read_json(folder / ROWS)
        return [
            Row(
                row["label"],
                tuple(row["values"]),
                tuple(
                    Result.read(Outcome.model_validate(result["outcome"]), folder / result["folder"])
                    for result in row["results"]
                ),
            )
            for row in kept["rows"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise problem(str(folder), f"its {ROWS} cannot be read: {error}", "run the comparison again") from None


def _beside(path: Path, folder: Path) -> str:
    """Returns a relative path, so that a comparison may be moved as a whole."""
    return str(path.relative_to(folder))


def _measured(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the folders of the runs of cells that were not refused."""
    for row in rows:
        yield from (each["folder"] for each in row["results"] if each["outcome"]["status"] != "refused")


def _set_aside(folder: Path, now: set[str]) -> Path | None:
    """Moves the files of an earlier comparison that has rows besides the present ones; returns where to, or None.

    rows.json goes last: a kill in between leaves the rest to the next comparison.
    """
    try:
        text = (folder / ROWS).read_text(encoding="utf-8")
        kept = json.loads(text)
        if set(_measured(kept["rows"])) <= now:
            return None
        for result in (result for row in kept["rows"] for result in row["results"]):
            result["folder"] = f"../../{result['folder']}"
        axes = "-".join(kept["axes"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):  # what it was is not known, so it is kept as it is
        text, kept, axes = "", None, "unreadable"
    return _moved(folder, folder / EARLIER / f"{slug(axes or 'one run')}-{_hash(text)}", kept)


def _moved(folder: Path, aside: Path, kept: dict[str, Any] | None) -> Path:
    try:
        aside.mkdir(parents=True, exist_ok=True)
        for path in files_of(folder):
            if path.exists():
                _replace(path, aside / path.name)
        if kept is None:
            _replace(folder / ROWS, aside / ROWS)
        else:
            write_whole(aside / ROWS, json.dumps(kept, indent=1))
            (folder / ROWS).unlink()
    except OSError as error:
        why = f"the earlier comparison in {folder} cannot be moved to {aside}: {error.strerror}"
        raise problem("--output", why, "give another folder: the cells are kept") from None
    return aside


def _replace(path: Path, to: Path) -> None:
    if to.is_dir():
        shutil.rmtree(to)
    path.replace(to)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
