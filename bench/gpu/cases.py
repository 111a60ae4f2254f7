"""A part is a list of cases, each a process of its own; what a case gives is kept as it ends, and not done again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from bench.gpu.setting import ROOT, Setting, installed, slug, stamp

BUDGET_SECONDS = 460.0  # of a part: below eight minutes, with the start of the next process
MOST_ATTEMPTS = 2
Status = Literal["done", "missed", "failed", "cut off", "skipped"]
NOT_DONE = ("missed", "failed", "cut off")
Report = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """work: "module:function", the module one of bench.gpu, which gets `given`, the setting and a folder; returns what
    it found: with `missed`, a reason, where a check failed, or `not_here` where it cannot be done on this device.

    needs: packages without which it is skipped. seconds: with less time left it is not begun. after: the cases before
    it that must have been done.
    """

    name: str
    work: str
    given: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    seconds: float = 30.0
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """found: what the case returned. why: of a case that is not done. missed: a check that failed."""

    status: Status
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    attempts: int = 1

    @property
    def settled(self) -> bool:
        """Returns whether the case is not run again."""
        return self.status == "done" or (self.status != "skipped" and self.attempts >= MOST_ATTEMPTS)


class Record:
    """The results file of a part."""

    def __init__(self, path: Path) -> None:
        self.path = path
        read = json.loads(path.read_text()) if path.exists() else {}
        self.stamp: dict[str, Any] = read.get("stamp", {})
        self.results = {name: Result(**found) for name, found in read.get("cases", {}).items()}

    def keep(self, name: str, result: Result, setting: Setting) -> None:
        """Written at once: what comes next may be cut off."""
        self.results[name] = result
        self.stamp = self.stamp or stamp(setting)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(".partial")
        cases = {each: asdict(found) for each, found in self.results.items()}
        aside.write_text(json.dumps({"stamp": self.stamp, "cases": cases}, indent=1) + "\n")
        aside.replace(self.path)


def run_part(cases: Sequence[Case], record: Record, setting: Setting, say: Report, budget: float, jobs: int = 1) -> int:
    """Runs what is left of a part for `budget` seconds. Returns how many cases are left for a next time.

    jobs: how many cases run at once; more than one only where nothing is timed and no case comes after another.
    """
    deadline, keeping = time.monotonic() + budget, Lock()

    def once(case: Case) -> bool:
        """Returns whether the case is left."""
        before = record.results.get(case.name)
        if before is not None and before.settled:
            return False
        why = obstacle(case, record)
        if why is not None:
            result = Result("skipped", why=why)
        elif deadline - time.monotonic() < case.seconds:
            return True
        else:
            attempts = 1 if before is None else before.attempts + 1
            result = in_process(case, setting, deadline - time.monotonic(), attempts)
        with keeping:
            record.keep(case.name, result, setting)
            say(f"  {case.name}: {result.status} in {result.seconds:.0f} s{f'; {result.why}' if result.why else ''}")
        return not (result.settled or result.status == "skipped")

    with ThreadPoolExecutor(jobs) as pool:
        return sum(pool.map(once, in_order(cases, record)))


def in_order(cases: Sequence[Case], record: Record) -> list[Case]:
    """Those that were never tried come first, so that one that fails does not keep others waiting."""
    return sorted(cases, key=lambda case: case.name in record.results and record.results[case.name].status in NOT_DONE)


def obstacle(case: Case, record: Record) -> str | None:
    """Returns why the case cannot be run, or None."""
    missing = [name for name in case.needs if installed(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    open_yet = [name for name in case.after if name not in record.results or record.results[name].status != "done"]
    return f"{', '.join(open_yet)} is not done" if open_yet else None


def in_process(case: Case, setting: Setting, limit: float, attempts: int) -> Result:
    """Runs the case and all that it starts, for `limit` seconds."""
    setting.scratch.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="case-", dir=setting.scratch) as folder:
        task, answer, log = (Path(folder) / name for name in ("task.json", "answer.json", "log"))
        where = {"device": setting.device, "device_name": setting.device_name, "scratch": str(setting.scratch)}
        task.write_text(json.dumps({"given": case.given, "setting": where, "folder": folder}))
        with log.open("w") as out:
            words = [sys.executable, "-m", "bench.gpu.child", case.work, str(task), str(answer)]
            child = subprocess.Popen(
                words, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
            )
            code = _ended(child, limit)
        seconds = time.monotonic() - begun
        if code is None:
            _keep_log(log, case, setting)
            return Result("cut off", seconds, why=f"the part's time was over after {seconds:.0f} s", attempts=attempts)
        if code != 0 or not answer.exists():
            _keep_log(log, case, setting)
            return Result("failed", seconds, why=f"exit code {code}: {_last(log)}", attempts=attempts)
        found = json.loads(answer.read_text())
        if "missed" in found:
            _keep_log(log, case, setting)
    if "not_here" in found:
        return Result("skipped", seconds, why=found["not_here"], attempts=attempts)
    missed = found.pop("missed", "")
    return Result("missed" if missed else "done", seconds, found, missed, attempts)


def _keep_log(log: Path, case: Case, setting: Setting) -> None:
    """Copies what a case that is not done has printed to where its folder's end does not reach."""
    setting.logs.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(log, setting.logs / f"{slug(case.name)}.log")


def environment() -> dict[str, str]:
    """This checkout first on the path, and no hub to ask."""
    path = [str(ROOT / "src"), str(ROOT), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **offline, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def _ended(child: subprocess.Popen[Any], limit: float) -> int | None:
    """The exit code; None where the time was over. What the child started goes with it."""
    try:
        return child.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _last(log: Path) -> str:
    """The last line of what was printed that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:400] if lines else "without a word"
