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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from drivetrain.board.run_file import flow, values_of
from drivetrain.config.files import parsed_yaml
from drivetrain.errors import problem
from drivetrain.web.refusals import Refusal

SECONDS = 300
AT_ONCE = 2
MOST_WAITING = 6  # of the server's 40 threads
COMMAND = (sys.executable, "-m", "drivetrain")
MOST_FIXES = 5
REFUSED = 2  # exit code of a verb that found problems, and printed them


class VerbProcess:
    """Runs verbs that print JSON. A user's newer request ends the older one, whose answer no page waits for: so each
    user holds one thread a verb."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._outputs: dict[str, Path] = {}  # of each user's newest verb of a kind, while it runs
        self._turns: dict[str, object] = {}  # the newest request of each user and verb
        self._taken = self._waiting = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def check(self, caller: str, text: str, name: str) -> dict[str, Any]:
        """Returns what `drivetrain check` prints at last."""
        place = f"output={flow(str(self._root / name))}"
        return self._on_file(caller, text, "check", f"name={flow(name)}", place, "--json-lines")

    def checked_so_far(self, caller: str) -> dict[str, Any] | None:
        """Returns what the check that runs for a user has shown; None where none runs, or it has shown nothing yet."""
        with suppress(KeyError, OSError):
            text = self._outputs[f"check {caller}"].read_text(encoding="utf-8")
            line = _last_line(text.rpartition("\n")[0])  # the one that is being written is left out
            return dict(json.loads(line)) if line else None
        return None

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
            found = self._run(f"{verb} {caller}", [verb, str(file), *words], Path(folder, "output"))
        return {**found, "seconds": time.monotonic() - begun}

    def close(self) -> None:
        """Ends what runs, and what waits for a place: the board closes."""
        with self._changed:
            self._is_closed = True
            for process in self._running.values():
                _signal(process)
            self._changed.notify_all()

    def _run(self, caller: str, words: list[str], output: Path) -> dict[str, Any]:
        with self._place(caller) as turn:
            process = self._started(caller, turn, words, output)
            try:
                _, errors = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                _signal(process)
                process.communicate()
                raise Refusal(504, f"drivetrain {words[0]} took more than {SECONDS} s", "too_slow") from None
            if process.returncode == -signal.SIGKILL:
                self._refuse_if_over(caller, turn)
                why = f"drivetrain {words[0]} was killed; the system does that when memory runs out"
                raise Refusal(500, why, "failed")
        try:
            text = output.read_text(encoding="utf-8")
            found: dict[str, Any] = json.loads(_last_line(text) if words[0] == "check" else text)
        except ValueError:
            why = errors.strip()[-1500:] or f"it ended with code {process.returncode}"
            if process.returncode == REFUSED:
                raise problem("yaml", why, "correct it, and look again") from None
            raise Refusal(500, f"drivetrain {words[0]} failed: {why}", "failed") from None
        return found

    @contextmanager
    def _place(self, caller: str) -> Iterator[object]:
        """Waits for one of the places, and holds it. Yields the request's turn. Raises Refusal at once where too many
        wait already: each that waits holds one of the server's threads."""
        turn = object()
        with self._changed:
            if self._waiting >= MOST_WAITING:
                why = f"{self._waiting} checks, previews and plans wait already: try again in a moment"
                raise Refusal(503, why, "busy", headers={"retry-after": "5"})
            self._turns[caller] = turn
            if caller in self._running:
                _signal(self._running[caller])
            self._changed.notify_all()
            self._waiting += 1
            try:
                while self._taken >= AT_ONCE and not self._is_over(caller, turn):
                    self._changed.wait()
                self._refuse_if_over(caller, turn)
                self._taken += 1
            finally:
                self._waiting -= 1
        try:
            yield turn
        finally:
            with self._changed:
                self._taken -= 1
                if self._turns.get(caller) is turn:
                    del self._turns[caller]
                    self._running.pop(caller, None)
                    self._outputs.pop(caller, None)
                self._changed.notify_all()

    def _started(self, caller: str, turn: object, words: list[str], output: Path) -> subprocess.Popen[str]:
        with self._changed, output.open("w") as written:
            self._refuse_if_over(caller, turn)
            self._outputs[caller] = output
            process = self._running[caller] = subprocess.Popen(
                [*COMMAND, *words],
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        return process

    def _is_over(self, caller: str, turn: object) -> bool:
        return self._is_closed or self._turns.get(caller) is not turn

    def _refuse_if_over(self, caller: str, turn: object) -> None:
        """Raises Refusal where the board closes, or a newer request of the same user took a request's place."""
        if self._is_closed:
            raise Refusal(503, "the board is closing", "closing")
        if self._turns.get(caller) is not turn:
            raise Refusal(409, "a newer request took its place", "superseded")


def _signal(process: subprocess.Popen[str]) -> None:
    """Kills a process with all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(text: str) -> str:
    return text.rstrip("\n").rpartition("\n")[2]


def previewed(report: dict[str, Any]) -> dict[str, Any]:
    """Returns the report of `drivetrain data` with its samples as the rows of a table."""
    tables = ("samples", "class counts", "class samples", "seconds")
    rest = {name: value for name, value in report.items() if name not in tables}
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
