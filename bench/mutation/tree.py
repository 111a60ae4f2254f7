"""A copy of the project in which one mutation at a time is made and tests are run."""

from __future__ import annotations

import ast
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from bench.mutation import observer
from bench.mutation.forked import Forked, Server
from bench.mutation.operators import Mutation

LEFT_OUT = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "runs", "build", "dist")
MARK = "MUTATION_TREE"  # in the environment of all that a test starts
POLL_SECONDS = 0.1
END_SECONDS = 20  # pytest may take after its last test


@dataclass(frozen=True)
class Outcome:
    """What a run of tests came to. `tests`: the one that failed or hung, or the files where none had begun."""

    verdict: Literal["passed", "failed", "hung", "out of time"]
    tests: tuple[str, ...] = ()
    started: int = 0


class Tree:
    """`folder` holds the copy as folder/tree. Real data beside the project (../shared) are seen beside the copy too."""

    def __init__(self, project: Path, folder: Path, test_seconds: float, nice: int = 10) -> None:
        self.root = folder / "tree"
        self._folder, self.test_seconds = folder, test_seconds
        self._serial = itertools.count(1)
        shutil.copytree(project, self.root, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        if (project.parent / "shared").is_dir():
            (folder / "shared").symlink_to((project.parent / "shared").resolve())
        (folder / "plugin").mkdir()
        shutil.copy(observer.__file__, folder / "plugin" / "mutation_observer.py")
        self.failing: set[str] = set()  # tests that fail without any mutation
        self._passing: set[tuple[tuple[str, ...], float]] = set()
        self.stopped = threading.Event()  # set by another thread: what runs ends
        self._check_imports()
        self._server = Server(self.root, self._environment(), outside(self.root), nice)

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """Python takes compiled code for current by time in whole seconds and size: each mutation has a time of its
        own, years ahead, so that neither it nor the original is ever run from the other's compiled code."""
        path = self.root / mutation.file
        original, stamp = path.read_bytes(), path.stat()
        changed = mutation.applied(original)
        compile(changed, mutation.file, "exec", dont_inherit=True)
        path.write_bytes(changed)
        ahead = stamp.st_mtime + 10**8 + next(self._serial)
        os.utime(path, (ahead, ahead))
        try:
            yield
        finally:
            path.write_bytes(original)
            os.utime(path, (stamp.st_atime, stamp.st_mtime))

    def passes(self, tests: tuple[str, ...], seconds: float) -> bool:
        """Returns whether tests pass without a mutation, each in so many seconds; they are asked once. Those that do
        not are left out from then on."""
        if (tests, seconds) not in self._passing:
            files = not any("::" in test for test in tests)  # no test had begun: they could not be imported
            if self.run(tests, math.inf, only_import=files, each=seconds).verdict == "passed":
                self._passing.add((tests, seconds))
            else:
                self.failing |= set(tests)
        return (tests, seconds) in self._passing

    def run(
        self, tests: Sequence[str], seconds: float, marker: str = "", only_import: bool = False, each: float = 0
    ) -> Outcome:
        """Runs test files or single tests in this order up to the first that fails or takes longer than a test may
        (`each` seconds, else the tree's). `seconds`: after which none is waited for ("out of time")."""
        own = Path(tempfile.mkdtemp(dir=self._folder, prefix="tests-"))
        arguments = ["-x", "-p", "mutation_observer", "-p", "no:cacheprovider", *(["-m", marker] if marker else [])]
        arguments += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]  # before the fork
        arguments += ["--collect-only"] if only_import else []
        arguments += [f"--deselect={test}" for test in sorted(self.failing)]
        (own / "tmp").mkdir()
        (own / "observed").touch()
        added = {"TMPDIR": str(own / "tmp"), observer.VARIABLE: str(own / "observed"), MARK: str(own)}
        run = self._server.start([*arguments, *tests], added, own / "output")
        try:
            return self._watched(run, own, tuple(tests), seconds, each or self.test_seconds)
        finally:
            run.end()
            _end_marked(own)
            shutil.rmtree(own, ignore_errors=True)

    def close(self) -> None:
        """Ends what runs, and the process that tests are forked from."""
        self.stopped.set()
        self._server.close()

    def _check_imports(self) -> None:
        """AssertionError unless tests in the copy import the copy, whatever is installed."""
        for package in (each.name for each in (self.root / "src").iterdir() if (each / "__init__.py").exists()):
            code = f"import importlib.util as u; print(u.find_spec({package!r}).origin)"
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=self.root, env=self._environment(), stdout=subprocess.PIPE, text=True
            )
            assert done.stdout.startswith(str(self.root)), (
                f"{package} is imported from {done.stdout}, not from the copy"
            )

    def _environment(self) -> dict[str, str]:
        left_out = {"PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTEST_ADDOPTS"}
        path = os.pathsep.join(map(str, (self.root / "src", self.root, self._folder / "plugin")))
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def _watched(self, run: Forked, own: Path, tests: tuple[str, ...], seconds: float, each: float) -> Outcome:
        until, since, seen = time.monotonic() + seconds, time.monotonic(), 0
        while run.ended(POLL_SECONDS) is None:
            size = (own / "observed").stat().st_size
            if size != seen:
                seen, since = size, time.monotonic()
            if self._failed(own):  # what pytest still tears down is no part of the verdict
                run.ended(END_SECONDS)
                break
            if time.monotonic() - since > each:
                return Outcome("hung", self._last(own, tests), len(self._started(own)))
            if time.monotonic() > until or self.stopped.is_set():
                return Outcome("out of time", started=len(self._started(own)))
        started = len(self._started(own))
        if failed := self._failed(own):
            return Outcome("failed", (failed[0],), started)
        if run.ended(0) in (0, 5):  # 5: no test was chosen
            return Outcome("passed", started=started)
        return Outcome("failed", self._last(own, tests), started)

    def _last(self, own: Path, tests: tuple[str, ...]) -> tuple[str, ...]:
        started = self._started(own)
        return (started[-1],) if started else tests

    def _started(self, own: Path) -> list[str]:
        return [nodeid for what, nodeid in _observed(own) if what == "started"]

    def _failed(self, own: Path) -> list[str]:
        return [nodeid for what, nodeid in _observed(own) if what == "failed"]


def _observed(own: Path) -> list[list[str]]:
    """Whole lines; one that is being written is read next time."""
    lines = (own / "observed").read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def _end_marked(own: Path) -> None:
    """Ends all that the tests started, sessions of their own included: their environment names the folder."""
    for each in psutil.process_iter():
        try:
            if each.environ().get(MARK) == str(own):
                each.kill()
        except psutil.Error:  # another's, or gone by now
            continue


def outside(root: Path) -> list[str]:
    """Returns what the project's files and its tests' conftest import of other packages, as module or module:name.

    Optional packages are left out: importing one may do something, as DeepSpeed looks for its device then.
    """
    own = {path.name for path in (root / "src").iterdir()} | _optional(root / "pyproject.toml")
    found: set[str] = set()
    for file in sorted([*(root / "src").rglob("*.py"), *(root / "tests").rglob("conftest.py")]):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
    return sorted(name for name in found if re.split("[.:]", name)[0] not in own)


def _optional(file: Path) -> set[str]:
    extras = tomllib.loads(file.read_text()).get("project", {}).get("optional-dependencies", {})
    named = {each for extra, names in extras.items() if extra != "dev" for each in names}
    return {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in named} | {"tests"}
