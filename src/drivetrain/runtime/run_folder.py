"""The folder of a run: where its files lie, and which process may write there."""

from __future__ import annotations

import contextlib
import io
import json
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.representer import SafeRepresenter

from drivetrain.config.models_of_runs import LINKS
from drivetrain.config.run import RunConfig
from drivetrain.errors import RunError, last_line, problem
from drivetrain.runtime import storage
from drivetrain.runtime.atomic_file import followed, write_whole, writing
from drivetrain.runtime.lock import refuse_if_held
from drivetrain.runtime.store_cache import with_addresses
from drivetrain.trust.named_code import refuse_named_code

_RECORDS = ("trackers.json", "tensorboard", "wandb", "swanlab", "mlflow.db", "metrics.prom")  # of trackers
_MARKS = ("events.jsonl", "environment.json")  # each run begins with the first

NEXT_LINE = "\x85"


@dataclass(frozen=True)
class RunFolder:
    """run.yaml (resolved), environment.json, events.jsonl, samples.jsonl, report.json, scores.npz, checkpoints/, best
    and last (links to two of them), trouble/ (anomalies), hangs/, journal/ (answers and rewards), and the records of
    trackers: tensorboard/, wandb/, ..."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def trouble(self) -> Path:
        return self.path / "trouble"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def hangs(self) -> Path:
        return self.path / "hangs"

    @property
    def run_file(self) -> Path:
        return self.path / "run.yaml"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def scores(self) -> Path:
        """The file of what each evaluation sample added to the last evaluation's metrics."""
        return self.path / "scores.npz"

    @property
    def results(self) -> list[Path]:
        """Files that a run leaves and that an overwriting run removes; last those that distinguish it from a project's
        own files."""
        names = ("run.yaml", "samples.jsonl", "report.json", "scores.npz", "checkpoints", "trouble", "hangs")
        return [self.path / name for name in (*LINKS, *_RECORDS, *names, "journal", *_MARKS)]

    @property
    def has_trained(self) -> bool:
        """Returns whether a run reached its first step here. One that died before leaves nothing to lose."""
        saved = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return saved or bool(present(self.report, self.path / "samples.jsonl", self.trouble)) or self._has_point

    @property
    def _has_point(self) -> bool:
        """Returns whether the curve has a point."""
        events = self.path / _MARKS[0]
        with contextlib.suppress(OSError), events.open("rb") as file:
            return any(b'"event": "step"' in line for line in file)
        return False

    def prepare(self, resume: bool, overwrite: bool, sources: Iterable[str] = ()) -> None:
        """Prepares the folder. Raises UserError if it cannot be written, or holds files that must not be touched.

        Overwritten files are set aside until `begun`. sources: paths that the run is made from.
        """
        self._make_writable()
        if resume:
            self._refuse_foreign(present(self.run_file, self.report, self.path / "samples.jsonl"))
            return
        self.put_back()  # of a start that was killed before it had begun
        self.refuse_if_taken(overwrite)
        self._refuse_made_from(sources)
        try:
            _move(self._there, self._aside)
        except OSError as error:
            self.put_back()
            why = f"{self.path} cannot be overwritten: {error.strerror}"
            raise problem("output", why, "give another output or name") from None

    def refuse_unless_ready(self, resume: bool, overwrite: bool, sources: Iterable[str] = ()) -> None:
        """Raises UserError if `prepare` would, or if a run is working in the folder; changes nothing."""
        there = next(path for path in (self.path, *self.path.absolute().parents) if os.path.lexists(path))
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = f"{self.path} cannot be written: {there} is {'read-only' if there.is_dir() else 'no folder'}"
            raise problem("output", why, "give another folder as output")
        refuse_if_held(self.path)
        if resume:
            self._refuse_foreign(present(self.run_file, self.report, self.path / "samples.jsonl"))
        else:
            self.refuse_if_taken(overwrite)
            self._refuse_made_from(sources)

    def begun(self) -> None:
        """Deletes the overwritten files, once no check can refuse the run any more."""
        storage.discard(self._aside)

    def put_back(self) -> bool:
        """Puts back the files that were to be overwritten if the run has not begun. Returns whether there were any.

        Only files with a copy set aside are deleted: a kill may have left others where they were.
        """
        earlier = present(*(self._aside / path.name for path in self.results))
        for path in present(*(self.path / each.name for each in earlier)):
            storage.remove(path)
        _move(earlier, self.path)
        storage.remove_empty(self._aside)
        return bool(earlier)

    @property
    def _aside(self) -> Path:
        return self.path / ".overwritten"

    @property
    def _there(self) -> list[Path]:
        return [path for path in present(*self.results) if path.name not in LINKS or path.is_symlink()]

    def refuse_if_busy(self) -> None:
        """Raises UserError if a run is working in the folder, or did. For a process that does not hold the folder
        itself."""
        refuse_if_held(self.path)
        self.refuse_if_taken()

    def refuse_if_taken(self, overwrite: bool = False) -> None:
        """Raises UserError if it holds a run that must not be overwritten, or files that no run left there."""
        self._refuse_foreign(self._there)
        if not self._there:
            return
        if not overwrite and self.has_trained:
            raise problem(
                "output",
                f"{self.path} already holds a run ({_names(self._there)})",
                "go on with --resume, replace it with --overwrite, or give another output or name",
            )
        linked = [path for path in self._there if path.is_symlink() and path.is_dir() and path.name not in LINKS]
        if linked:
            why = f"{_names(linked)} in {self.path} points to a folder elsewhere, which is not for a run to delete"
            raise problem("output", why, "empty that folder yourself and take the link away, or give another output")

    def _refuse_foreign(self, there: list[Path]) -> None:
        if there and not present(*(self.path / mark for mark in _MARKS)):
            why = f"{self.path} holds {_names(there)}, which no run left there"
            raise problem("output", why, "give another output or name")

    def _refuse_made_from(self, sources: Iterable[str]) -> None:
        doomed = set(map(followed, self._there))
        for source in sources:
            path = followed(source)
            if len(Path(source).parts) > 1 and doomed & {path, *path.parents}:
                why = f"{source} is what the run is made from, and would be overwritten with what {self.path} holds"
                raise problem("output", why, "give another output or name")

    def _make_writable(self) -> None:
        try:
            storage.check_writable(self.path)
        except OSError as error:
            raise problem(
                "output", f"{self.path} cannot be written: {error.strerror}", "give another folder as output"
            ) from None

    def describe(self, run: RunConfig, environment: dict[str, Any]) -> None:
        """Writes the environment and the resolved run file beside the results: both, or (RunError) none."""
        resolved, file = with_addresses(run.model_dump(mode="json")), self.path / "environment.json"
        text = _in_yaml(resolved)
        if NEXT_LINE in text:  # which a reader takes for the end of the line
            text = _in_yaml(resolved, escapes=True)
        with writing(file), storage.replaced(file, json.dumps(environment, indent=2) + "\n"), writing(self.run_file):
            write_whole(self.run_file, text)


def run_around(place: Path) -> RunFolder | None:
    """Returns the run that a checkpoint's folder lies in; None if it lies in no run."""
    run = RunFolder(place.parent.parent)
    return run if run.run_file.is_file() and place.parent == run.checkpoints else None


class SameFolder:
    """Notices when a path no longer leads to the same folder: it was deleted, moved, or replaced.

    The folder is kept open, so that the file system gives its inode's number to no other one.
    """

    def __init__(self, path: Path) -> None:
        """Raises RunError if the folder cannot be opened."""
        self._path = path
        with writing(path):
            self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except OSError:
            return False

    def check(self) -> None:
        """Raises RunError unless the path still leads there."""
        if not self.in_place:
            raise RunError(
                f"{self._path} is no longer the folder that this run began in{self._now}: nothing more is written "
                "there. If it was moved, put it back and go on with --resume; if it was deleted, start anew"
            )

    @property
    def _now(self) -> str:
        try:
            self._path.stat()
        except OSError as error:
            return f" ({last_line(error)})"
        return " (another one lies there)"


def refuse_code_of_folders(run: RunConfig, run_file: Path, trusted: bool) -> None:
    """Raises UserError for Python that the run.yaml of a run's folder names, unless it is trusted
    (trust/named_code.py)."""
    folder = RunFolder(run_file.parent)
    if run_file.name == folder.run_file.name and present(*(folder.path / mark for mark in _MARKS)):
        refuse_named_code(run, folder.path, trusted)


def present(*paths: Path) -> list[Path]:
    return [path for path in paths if os.path.lexists(path)]


class _Quoting(SafeRepresenter):
    """Quotes texts that begin with a question mark or a colon: ruamel.yaml 0.19 writes them plain within braces, and
    does not read them there."""

    def represent_str(self, data: str) -> Any:
        return self.represent_scalar("tag:yaml.org,2002:str", data, '"' if data.startswith(("?", ":")) else None)


_Quoting.add_representer(str, _Quoting.represent_str)


def _in_yaml(value: Any, escapes: bool = False) -> str:
    yaml, text = YAML(typ="safe", pure=True), io.StringIO()
    yaml.Representer, yaml.allow_unicode = _Quoting, not escapes
    yaml.dump(value, text)
    return text.getvalue()


def _names(paths: Iterable[Path]) -> str:
    return ", ".join(path.name for path in paths)


def _move(paths: Iterable[Path], folder: Path) -> None:
    for path in paths:
        storage.move(path, folder / path.name)
