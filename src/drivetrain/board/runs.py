"""The runs in the board's folder: what their folders say, with the entries of the queue that made them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.board.entries import RUN_FILE, Entries
from drivetrain.board.last_start import LastStarts
from drivetrain.board.records import Entry
from drivetrain.board.run_summary import BESIDE, Beside, is_run, sign_of, summary
from drivetrain.errors import problem
from drivetrain.runtime.atomic_file import write_whole
from drivetrain.runtime.lock import LOCK, is_held
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.tracking.jsonl import FILE_NAME
from drivetrain.web.refusals import Refusal

UNSETTLED = 3 * 10**9  # nanoseconds; file systems tell times of changes apart that lie at least 2 s apart
WATCHED = (FILE_NAME, "report.json", "run.yaml", BESIDE)  # files whose change changes what is shown
NAME = re.compile(r"[^/\\\0-\x1f.][^/\\\0-\x1f]{0,199}")


@dataclass(frozen=True)
class Seen:
    """A run's summary, and the state of the files that it was made from.

    rests: nothing works there, so that its folder and its events alone are looked at: a system call costs more than all
    else, and 200 runs are looked at each second. Files that are replaced, a lock too, change the folder. at_first: what
    is compared then.
    """

    sign: Any
    summary: dict[str, Any]
    at_first: Any
    rests: bool


class Runs:
    """root: the folder of runs."""

    def __init__(self, root: Path, entries: Entries) -> None:
        self.root, self._entries = root, entries
        self._seen: dict[str, Seen] = {}
        self._starts = LastStarts()
        self._lock = threading.Lock()

    def all(self) -> list[dict[str, Any]]:
        """Returns the summaries of all runs, the newest first; unchanged ones are the same objects as before."""
        newest, needed = self._newest(), self._needed()
        names = {*self._names(), *newest}
        with self._lock:
            found = {name: self._summary(name, newest.get(name), name in needed) for name in names}
            self._seen = {name: each for name, each in found.items() if each is not None}
            summaries = [each.summary for each in self._seen.values()]
        return sorted(summaries, key=lambda each: (each["created"] or "", each["name"]), reverse=True)

    def one(self, name: str) -> dict[str, Any]:
        """Returns a summary. Raises Refusal (404)."""
        self.check_name(name)
        with self._lock:
            found = self._summary(name, self._newest().get(name), name in self._needed())
            if found is None:
                raise Refusal(404, f"there is no run {name!r}", "no_run", "name")
            self._seen[name] = found  # the pages that look at a run ask at once when it changes
            return found.summary

    def folder(self, name: str) -> Path:
        """Returns the folder of a run's name. Raises Refusal for a text that is no name."""
        self.check_name(name)
        return self.root / name

    def check_name(self, name: str) -> None:
        if NAME.fullmatch(name) is None:
            raise Refusal(404, "that is no name of a run", "no_run", "name")

    def free_name(self, wanted: str) -> str:
        """Returns the name, or one with a number after it, that neither a folder nor an entry has."""
        if NAME.fullmatch(wanted) is None:
            raise problem("name", f"{wanted!r} cannot be a folder's name here", "begin with a letter, without / and \\")
        taken = {each.asked.run for each in self._entries.all()}
        number, name = 1, wanted
        while name in taken or os.path.lexists(self.root / name):
            number += 1
            name = f"{wanted[:190]}-{number}"
        return name

    def entries_of(self, name: str) -> list[Entry]:
        """Returns the entries about a run, the newest first."""
        found = [each for each in self._entries.all() if each.asked.run == name]
        return sorted(found, key=lambda each: each.asked.created, reverse=True)

    def run_file(self, name: str) -> Path:
        """Returns the run file as it was sent; else, for a run from elsewhere, the one that the run resolved and left
        in its folder, whose Python the command line runs only as it runs that of any run's folder."""
        sent = [self._entries.folder / each.id / RUN_FILE for each in reversed(self.entries_of(name))]
        return next((each for each in sent if each.is_file()), RunFolder(self.folder(name)).run_file)

    def submitted(self, name: str) -> str:
        """Returns the text of the run file; "" where there is none."""
        with contextlib.suppress(OSError):
            return self.run_file(name).read_text(encoding="utf-8", errors="replace")
        return ""

    def write_beside(self, name: str, beside: Beside) -> None:
        self.one(name)
        folder = self.folder(name)
        if not folder.is_dir():
            raise Refusal(409, "the run has no folder yet", "not_started")
        write_whole(folder / BESIDE, beside.model_dump_json(indent=1))

    def delete(self, name: str, lock: AbstractContextManager[Any] | None = None) -> int:
        """Deletes a run of which nothing waits or works. Returns the bytes that it had.

        lock: the queue's, under which entries are added, so that none comes between the look and the deletion.
        """
        aside = self.root / f".deleted-{os.getpid()}-{threading.get_ident()}-{name}"
        with lock or contextlib.nullcontext():
            self._refuse_deletion(name)
            folder = self.folder(name)
            size = size_of(folder)
            with contextlib.suppress(FileNotFoundError):  # an entry that ended before it made a folder
                folder.rename(aside)  # at once, so that a kill leaves no half of a run
            for each in self.entries_of(name):
                self._entries.forget(each)
        if aside.is_symlink():
            aside.unlink()
        else:
            shutil.rmtree(aside, ignore_errors=True)
        return size

    def _refuse_deletion(self, name: str) -> None:
        """Raises Refusal (409) for a run that works, and for one that an entry of the queue needs."""
        summary = self.one(name)
        for each in self.entries_of(name):
            if each.is_live:
                what = "the run" if each.asked.verb == "train" else f"{each.asked.verb} of the run"
                raise Refusal(409, f"{what} is {each.state}: stop or cancel it first", "busy")
        if "delete" not in summary["can"]:
            raise Refusal(409, f"the run is {summary['status']}: stop it first", "busy")

    # --- summaries -----------------------------------------------------------------------------------------------

    def _names(self) -> Iterator[str]:
        """Yields the folders that may be runs."""
        with contextlib.suppress(OSError), os.scandir(self.root) as found:
            for each in found:
                if NAME.fullmatch(each.name) and each.is_dir():
                    yield each.name

    def _newest(self) -> dict[str, Entry]:
        """Returns the newest training of each run."""
        trainings = [each for each in self._entries.all() if each.asked.verb == "train"]
        return {each.asked.run: each for each in sorted(trainings, key=lambda each: each.asked.created)}

    def _needed(self) -> set[str]:
        """Returns the runs of which something waits or works: a training, or what is made of a checkpoint."""
        return {each.asked.run for each in self._entries.all() if each.is_live}

    def _summary(self, name: str, entry: Entry | None, is_needed: bool) -> Seen | None:
        inside = f"{self.root}/{name}"
        at_first = (_changed(inside), _changed(f"{inside}/{FILE_NAME}"), entry, is_needed)
        before = self._seen.get(name)
        if before is not None and before.rests and before.at_first == at_first:
            return before
        folder = self.root / name
        works = is_held(folder)
        sign = (*[sign_of(folder / each) for each in WATCHED], works, entry, is_needed)
        rests = not (works or os.path.lexists(folder / LOCK) or _is_new(at_first[:2]))
        if before is not None and before.sign == sign:
            return Seen(sign, before.summary, at_first, rests)
        if entry is None and not is_run(folder):
            return None
        return Seen(sign, summary(folder, entry, works, is_needed, self._starts), at_first, rests)


def _changed(path: str) -> int:
    """Returns when a file or folder changed, in nanoseconds; 0 where there is none."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _is_new(changes: Sequence[int]) -> bool:
    """Returns whether one of the changes is so young that a second one might have the same time."""
    return time.time_ns() - max(changes) < UNSETTLED


def matching(
    runs: Sequence[dict[str, Any]], search: str, tag: str | None, status: str | None
) -> Iterator[dict[str, Any]]:
    """Yields the runs whose name, note, model or settings hold all words of the search."""
    words = search.lower().split()
    for each in runs:
        shown = ("name", "note", "model", "workload", "engine", "precision", "owner", "status")
        text = " ".join([*(str(each[key] or "") for key in shown), *each["tags"]]).lower()
        if all(word in text for word in words) and tag in (None, *each["tags"]) and status in (None, each["status"]):
            yield each


def files_of(folder: Path) -> list[dict[str, Any]]:
    """Returns the regular files of a folder with their sizes; links are not followed."""
    found = []
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(place, name)
            with contextlib.suppress(OSError):
                if not path.is_symlink() and path.is_file() and name != LOCK:
                    found.append({"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size})
    return found


def size_of(folder: Path) -> int:
    return sum(each["bytes"] for each in files_of(folder))
