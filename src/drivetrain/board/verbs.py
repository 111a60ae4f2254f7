"""Verbs that look at a run file of the form, each in a process of its own: they read data, build models and may take
gigabytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from drivetrain.board.run_file import flow, values_of
from drivetrain.config.files import parsed_yaml
from drivetrain.errors import problem
from drivetrain.web.refusals import Refusal

SECONDS = 300
AT_ONCE = 2
MOST_FIXES = 5
REFUSED = 2  # exit code of a verb that found problems, and printed them


class VerbProcess:
    """Runs verbs that print JSON. A user's newer request ends the older one, whose answer no page waits for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._places = threading.BoundedSemaphore(AT_ONCE)
        self._lock = threading.Lock()

    def check(self, caller: str, text: str, name: str) -> dict[str, Any]:
        """Returns what `drivetrain check --json` prints."""
        place = f"output={flow(str(self._root / name))}"
        return self._on_file(caller, text, "check", f"name={flow(name)}", place, "--json")

    def data(self, caller: str, text: str, rows: int, first: int, of_evaluation: bool) -> dict[str, Any]:
        """Returns what `drivetrain data --json --rows` prints."""
        words = [f"--rows={rows}", f"--first={first}", *(["--evaluation"] if of_evaluation else [])]
        return self._on_file(caller, text, "data", "--json", *words)

    def plan(self, caller: str, text: str, axes: Sequence[str], machine: str | None) -> dict[str, Any]:
        """Returns what `drivetrain plan --json` prints. axes: key=value,value."""
        words = [*([] if machine is None else [f"--machine={machine}"]), "--json"]
        return self._on_file(caller, text, "plan", *words, "--", *axes)

    def _on_file(self, caller: str, text: str, verb: str, *words: str) -> dict[str, Any]:
        values_of(text)
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="drivetrain-board-") as folder:
            file = Path(folder, "run.yaml")
            file.write_text(text, encoding="utf-8", newline="")
            found = self._run(f"{verb} {caller}", [verb, str(file), *words])
        return {**found, "seconds": time.monotonic() - begun}

    def _run(self, caller: str, words: list[str]) -> dict[str, Any]:
        self._end(caller)
        with self._places:
            process = subprocess.Popen(
                [sys.executable, "-m", "drivetrain", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            with self._lock:
                self._running[caller] = process
            try:
                output, errors = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                _kill(process)
                raise Refusal(504, f"drivetrain {words[0]} took more than {SECONDS} s", "too_slow") from None
            finally:
                with self._lock:
                    if self._running.get(caller) is process:
                        del self._running[caller]
        if process.returncode == -signal.SIGKILL:
            raise Refusal(409, "a newer request took its place", "superseded")
        try:
            found: dict[str, Any] = json.loads(output)
        except ValueError:
            why = errors.strip()[-1500:] or f"it ended with code {process.returncode}"
            if process.returncode == REFUSED:
                raise problem("yaml", why, "correct it, and look again") from None
            raise Refusal(500, f"drivetrain {words[0]} failed: {why}", "failed") from None
        return found

    def _end(self, caller: str) -> None:
        with self._lock:
            before = self._running.pop(caller, None)
        if before is not None:
            _kill(before)


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def previewed(report: dict[str, Any]) -> dict[str, Any]:
    """Returns the report of `drivetrain data` with its samples as the rows of a table."""
    rest = {name: value for name, value in report.items() if name not in ("samples", "class counts", "seconds")}
    classes = report.get("class counts")
    return {
        "total": report.get("train_samples", report.get("training samples")),
        "evaluation_total": report.get("evaluation_samples", report.get("evaluation samples")),
        "classes": classes
        and [{"name": e["class"], "train": e["training"], "evaluation": e["evaluation"]} for e in classes],
        "rows": [_row(each) for each in report.get("samples", [])],
        "report": rest,
        "seconds": report["seconds"],
    }


def _row(sample: dict[str, Any]) -> dict[str, Any]:
    """Returns a sample; the only text of one that has no others as its own segments."""
    sides = sample.get("sides", [])
    one = sides[0] if len(sides) == 1 else {}
    return {
        "number": sample["number"],
        "label": sample.get("reference"),
        "text": sample.get("text"),
        "picture": sample.get("picture"),
        "segments": one.get("segments"),
        "length": one.get("length"),
        "cut": bool(one.get("at_length")),
        "sides": sides if len(sides) > 1 else None,
    }


def fixes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns changes that make a run fit, from the rows of a plan that do: as keys to set, and in words."""
    found = []
    for row in plan.get("rows", []):
        if row["fits"] == "yes":
            pairs = [each.partition("=") for each in row["overrides"]]
            changes = {key: parsed_yaml(value) for key, _, value in pairs}
            found.append({"set": changes, "says": " ".join(row["overrides"]), "step_seconds": row["step_seconds"]})
    return found[:MOST_FIXES]
