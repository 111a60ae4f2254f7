"""The folder of a run: what lies where, and who may write there."""

from __future__ import annotations

import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from drivetrain.config.run import RunConfig
from drivetrain.errors import problem
from drivetrain.lock import refuse_if_held
from drivetrain.whole_file import write_whole

_MARKS = ("events.jsonl", "environment.json")  # each run begins with the first


@dataclass(frozen=True)
class RunFolder:
    """run.yaml (resolved), environment.json, events.jsonl, samples.jsonl, report.json, checkpoints/, tensorboard/,
    trouble/, hangs/."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def trouble(self) -> Path:
        return self.path / "trouble"

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
    def results(self) -> list[Path]:
        """What a run leaves, and an overwriting run takes away; last what tells it from a project's own files."""
        names = ("run.yaml", "samples.jsonl", "report.json", "checkpoints", "tensorboard", "trouble", "hangs", *_MARKS)
        return [self.path / name for name in names]

    def prepare(self, resume: bool, overwrite: bool) -> None:
        """Make the folder ready. UserError if it cannot be written, or holds a run that was not to be touched."""
        self._make_writable()
        if resume:
            return
        self.refuse_if_taken(overwrite)
        for path in self._there:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    @property
    def _there(self) -> list[Path]:
        return [path for path in self.results if path.exists()]

    def refuse_if_busy(self) -> None:
        """UserError if a run is working in it, or has been. For a process that does not hold the folder itself."""
        refuse_if_held(self.path)
        self.refuse_if_taken()

    def refuse_if_taken(self, overwrite: bool = False) -> None:
        """UserError if a run is in it that is not to be overwritten, or what no run left there."""
        names = ", ".join(path.name for path in self._there)
        if not names:
            return
        if not any((self.path / mark).exists() for mark in _MARKS):
            raise problem(
                "output", f"{self.path} holds {names}, which no run left there", "give another output or name"
            )
        if not overwrite:
            raise problem(
                "output",
                f"{self.path} already holds a run ({names})",
                "go on with --resume, replace it with --overwrite, or give another output or name",
            )
        linked = ", ".join(path.name for path in self._there if path.is_symlink() and path.is_dir())
        if linked:
            why = f"{linked} in {self.path} points to a folder elsewhere, which is not this run's alone to delete"
            raise problem("output", why, "empty that folder yourself and take the link away, or give another output")

    def _make_writable(self) -> None:
        trial = self.path / f".writable-{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            trial.write_text("")
            trial.unlink()
        except OSError as error:
            raise problem(
                "output", f"{self.path} cannot be written: {error.strerror}", "give another folder as output"
            ) from None

    def describe(self, run: RunConfig, environment: dict[str, Any]) -> None:
        """Write the environment and the resolved run file beside the results."""
        write_whole(self.path / "environment.json", json.dumps(environment, indent=2) + "\n")
        text = io.StringIO()
        YAML(typ="safe", pure=True).dump(run.model_dump(mode="json"), text)
        write_whole(self.run_file, text.getvalue())
