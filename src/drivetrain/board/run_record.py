"""The record of a run for its report: what its folder holds, and what only the board knows."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import quote

from drivetrain.board.entries import LOG, Entries
from drivetrain.board.queue_routes import TAIL, log_part
from drivetrain.board.records import Entry
from drivetrain.board.run_summary import is_run
from drivetrain.board.runs import Runs
from drivetrain.run_page.record import Record, read


def record_of(runs: Runs, entries: Entries, name: str) -> Record:
    """Returns the record of a run, with the state that the board shows. Raises Refusal (404)."""
    summary, folder = runs.one(name), runs.folder(name)
    entry = training_of(runs, name)
    log = "" if entry is None else str(log_part(entries.folder / entry.id / LOG, None, TAIL, True)["text"])
    return replace(
        read(folder, may_be_empty=entry is not None or is_run(folder)),
        status=summary["status"],
        message=summary["message"] or "",
        sent=runs.submitted(name) if entry is not None else "",
        command="" if entry is None else entry.command,
        log=log,
        note=summary["note"],
    )


def training_of(runs: Runs, name: str) -> Entry | None:
    """Returns the newest training of a run that the board started."""
    return next((each for each in runs.entries_of(name) if each.asked.verb == "train"), None)


def as_download(name: str) -> dict[str, str]:
    """Returns the header by which a browser keeps an answer as a file of this name (RFC 6266), in whatever script."""
    return {"content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}"}
