"""Reads what the page shows from a run's folder, of a run that has ended or not."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.config.files import read_yaml
from drivetrain.errors import UserError, problem
from drivetrain.run_page.answers import newest_answers
from drivetrain.runtime.lock import is_held
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.tracking.columns import Curve
from drivetrain.tracking.jsonl import FILE_NAME
from drivetrain.training.report import RunReport

KILLED = "its process ended without a word: it was killed, or the machine was restarted"
BAD = ("failed", "refused", "lost")
MOST_ANSWERS = 12


@dataclass(frozen=True)
class Record:
    """A run as its folder holds it. What follows `answers` is known only to what started it: the run file as it was
    written, the command, the end of what the process printed, and a user's note."""

    folder: Path
    status: str
    message: str
    config: dict[str, Any]
    resolved: str  # the run file with all defaults
    report: RunReport | None
    environment: dict[str, Any]
    curve: Curve | None
    events: list[dict[str, Any]]  # starts, warnings, anomalies, the end: the last ones
    checkpoints: list[str]  # names, the oldest first
    answers: list[dict[str, Any]]  # the newest, of which the newest is the last
    sent: str = ""
    command: str = ""
    log: str = ""
    note: str = ""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_bad(self) -> bool:
        return self.status in BAD

    @property
    def started(self) -> dict[str, Any]:
        """The newest start."""
        return next((each for each in reversed(self.events) if each["event"] == "run_started"), {})


def read(folder: Path, may_be_empty: bool = False) -> Record:
    """Returns the record of a run. may_be_empty: of one that ended before it left anything. Raises UserError for a
    folder that no run made."""
    there = RunFolder(folder)
    if not may_be_empty and not any((folder / name).is_file() for name in (FILE_NAME, "environment.json")):
        raise problem(str(folder), f"{folder} holds no run", "give the folder that train left: runs/NAME")
    curve = _curve(folder / FILE_NAME)
    events = [] if curve is None else [*curve.in_words]
    status, message = _status(folder, events)
    return Record(
        folder=folder,
        status=status,
        message=message,
        config=_config(there.run_file),
        resolved=_text(there.run_file),
        report=_report(there.report),
        environment=json_of(folder / "environment.json") or {},
        curve=curve,
        events=events,
        checkpoints=sorted(each.name for each in there.checkpoints.glob("step-*") if each.is_dir()),
        answers=newest_answers(folder, MOST_ANSWERS),
    )


def json_of(file: Path) -> dict[str, Any] | None:
    """Returns the object that a file holds; None for a file that is absent or holds none."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(file.read_bytes())
        return found if isinstance(found, dict) else None
    return None


def trouble_step(record: Record) -> int | None:
    """Returns the step of the newest anomaly whose state was kept, which `drivetrain replay` computes again."""
    kept = [each for each in record.events if each["event"] == "trouble" and each.get("kept")]
    return int(kept[-1]["step"]) if kept else None


def in_sentences(message: str) -> tuple[str, str]:
    """Splits the message of an error into its first sentence, without the error's class, and the others."""
    text = re.sub(r"^[A-Za-z_.]*(?:Error|OutOfMemory|Exception): ", "", message.strip())
    first, dot, rest = text.partition(". ")
    return (f"{first}.", rest) if dot else (text, "")


def _status(folder: Path, events: list[dict[str, Any]]) -> tuple[str, str]:
    ends = [each for each in events if each["event"] in ("run_started", "run_finished")]
    if is_held(folder):
        return "running", ""
    if ends and ends[-1]["event"] == "run_finished":
        return ends[-1]["status"], ends[-1].get("message") or ""
    return "lost", KILLED


def _config(file: Path) -> dict[str, Any]:
    try:
        return read_yaml(file)
    except UserError:
        return {}


def _text(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")
    return ""


def _report(file: Path) -> RunReport | None:
    """Returns the report; None where there is none, or a later version of drivetrain wrote another form of it."""
    with contextlib.suppress(OSError, ValueError):
        return RunReport.read(file).within(file.parent)
    return None


def _curve(file: Path) -> Curve | None:
    with contextlib.suppress(OSError):
        found = Curve(file, file.stat().st_ino)
        found.read_on()
        return found
    return None
