"""The tests on several versions of Python, with the lowest packages that pyproject.toml allows and with the newest.

    python -m bench.versions
    python -m bench.versions --only 3.12-lowest gpu-image
    python -m bench.versions --select tests/models tests/data
    python -m bench.versions --select packages              # the tests that met a difference between versions

A version of Python that this machine lacks is named and left out. Packages go into environments in .cache/versions.
Results go into bench/results/versions.json as they come, one for each combination and selection of tests, and
docs/reference/versions.md gets their table. UV_TORCH_BACKEND=cpu installs CPU builds of torch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

PROJECT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
ALL = "all but slow"
# tests that met a difference between versions of packages: --select packages
PACKAGES = (
    *("tests/memory", "tests/measure", "tests/models/test_language_head.py", "tests/models/test_adapted_head.py"),
    *("tests/models/test_preprocessing.py", "tests/engines/test_fsdp.py", "tests/workloads/test_language_build.py"),
    "tests/checkpoint/convert/test_refusals.py",
)
# of these a version without a wheel for the Python at hand would have to be compiled
COMPILED = (
    *("matplotlib", "mypy", "numpy", "pandas", "pillow", "psutil", "pyarrow", "pydantic-core"),
    *("safetensors", "scikit-learn", "scipy", "tokenizers"),
)
BEGIN, END = "<!-- versions table -->", "<!-- end -->"


@dataclass(frozen=True)
class Combination:
    name: str
    python: str
    options: tuple[str, ...] = ()  # of uv pip install
    requirements: tuple[str, ...] = ()  # beside the project's own


LOWEST = ("--resolution", "lowest-direct", *(word for name in COMPILED for word in ("--only-binary", name)))
COMBINATIONS = (
    Combination("gpu-image", "3.12", requirements=("torch==2.11.*", "transformers==5.17.*")),  # many images carry these
    *(Combination(f"{python}-lowest", python, LOWEST) for python in PYTHONS),
    *(Combination(f"{python}-newest", python, ("--upgrade",)) for python in PYTHONS),
)


@dataclass(frozen=True)
class Outcome:
    """How the tests of a selection ended with a combination. failures: the names of those that failed."""

    combination: str
    python: str
    torch: str
    transformers: str
    selection: str
    passed: int
    failed: int
    skipped: int
    date: str
    failures: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None, project: Path = PROJECT) -> int:
    parser = argparse.ArgumentParser(description="the tests on several versions of Python and of packages")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="combinations to run; all otherwise")
    what = "tests to run, or packages; all but slow otherwise"
    parser.add_argument("--select", nargs="+", default=[], metavar="PATH", help=what)
    options = parser.parse_args(arguments)
    combinations, uv, code = chosen(options.only), found_uv(), 0
    for combination in combinations:
        interpreter = found_python(uv, combination.python)
        if interpreter is None:
            print(f"{combination.name}: this machine has no Python {combination.python}", flush=True)
            continue
        environment = project / ".cache" / "versions" / combination.name
        if not installed(uv, combination, interpreter, environment, project):
            print(f"{combination.name}: its packages cannot be installed", flush=True)
            code = 1
            continue
        outcome = tested(combination.name, environment, options.select, project)
        if outcome is None:
            print(f"{combination.name}: pytest ended without a report", flush=True)
            code = 1
            continue
        keep(outcome, project)
        print(f"{combination.name}: {outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped")
        code = code or int(outcome.failed > 0)
    return code


def chosen(names: Sequence[str]) -> list[Combination]:
    """Returns the combinations of these names, or all. SystemExit for a name that none has."""
    known = {combination.name: combination for combination in COMBINATIONS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no combination is named {', '.join(unknown)}: there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(COMBINATIONS)


def found_uv() -> str:
    """Returns the path of uv: on PATH, or beside this Python. SystemExit where it is in neither."""
    beside = Path(sys.executable).parent / "uv"
    uv = shutil.which("uv") or (str(beside) if beside.is_file() else None)
    if uv is None:
        raise SystemExit("uv is not on PATH, and it makes the environments: pip install uv")
    return uv


def found_python(uv: str, version: str) -> Path | None:
    """Returns an interpreter of this version (such as "3.12") that runs: uv's, PATH's, or one of pyenv's."""
    asked = subprocess.run(
        [uv, "python", "find", "--no-project", "--system", version], capture_output=True, text=True, check=False
    )
    on_path = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [Path(line) for line in (asked.stdout.strip(), on_path or "") if line]
    candidates += sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True)
    return next((path for path in candidates if runs_as(path, version)), None)


def runs_as(interpreter: Path, version: str) -> bool:
    """Returns whether it can be started, which the shims of pyenv cannot always, and is of this version."""
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([interpreter, "-c", script], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.strip() == version


def installed(uv: str, combination: Combination, interpreter: Path, environment: Path, project: Path) -> bool:
    """Makes the environment, or brings it up to date."""
    python = environment / "bin" / "python"
    if not python.exists():
        made = subprocess.run([uv, "venv", "--quiet", "--python", interpreter, environment], check=False)
        if made.returncode:
            return False
    words = [uv, "pip", "install", "--quiet", "--python", str(python), *combination.options]
    words += [*combination.requirements, "--editable", f"{project}[dev]"]
    return subprocess.run(words, check=False).returncode == 0


def tested(name: str, environment: Path, selection: Sequence[str], project: Path) -> Outcome | None:
    """Runs the tests (none selected: all but the slow ones), whose progress goes to the screen. None where pytest could
    not begin, as when a package that all tests import is broken."""
    python, report = environment / "bin" / "python", environment / "tests.xml"
    report.unlink(missing_ok=True)
    words = [python, "-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider", f"--junitxml={report}"]
    words += PACKAGES if list(selection) == ["packages"] else selection
    subprocess.run(words, cwd=project, check=False)
    if not report.exists():
        return None
    return outcome_of(name, versions_in(python), " ".join(selection) or ALL, report.read_text(encoding="utf-8"))


def versions_in(python: Path) -> dict[str, str]:
    script = (
        "import json, platform; from importlib.metadata import version; "
        "print(json.dumps({'python': platform.python_version(), "
        "'torch': version('torch').partition('+')[0], 'transformers': version('transformers')}))"
    )
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def outcome_of(name: str, versions: dict[str, str], selection: str, report: str) -> Outcome:
    """Reads pytest's JUnit report. A file of tests that cannot be collected counts as one that failed."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    failures = [_name_of(case) for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    failed = len(set(failures))  # one that fails and cannot be torn down either is there twice
    passed = len({_name_of(case) for case in cases}) - failed - skipped
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Outcome(name, **versions, selection=selection, passed=passed, failed=failed, skipped=skipped, date=today,
                   failures=sorted(set(failures)))  # fmt: skip


def _name_of(case: ElementTree.Element) -> str:
    return "::".join(part for part in (case.get("classname"), case.get("name")) if part)


def keep(outcome: Outcome, project: Path) -> None:
    """Puts it in place of what the combination gave with the same selection before, and writes the page's table."""
    path = project / "bench" / "results" / "versions.json"
    kept = [each for each in read(path) if _key(each) != _key(outcome)]
    names = [combination.name for combination in COMBINATIONS]
    ordered = sorted(
        [*kept, outcome], key=lambda each: (names.index(each.combination), each.selection != ALL, each.selection)
    )
    path.write_text(json.dumps([asdict(each) for each in ordered], indent=1) + "\n", encoding="utf-8")
    page = project / "docs" / "reference" / "versions.md"
    page.write_text(with_table(page.read_text(encoding="utf-8"), ordered), encoding="utf-8")


def _key(outcome: Outcome) -> tuple[str, str]:
    return outcome.combination, outcome.selection


def read(path: Path) -> list[Outcome]:
    """The outcomes so far, but for combinations that there are no more."""
    names = {combination.name for combination in COMBINATIONS}
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return [Outcome(**each) for each in found if each["combination"] in names]


def with_table(page: str, outcomes: Iterable[Outcome]) -> str:
    """The page with the outcomes between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table(outcomes)}\n{END}{tail}"


def table(outcomes: Iterable[Outcome]) -> str:
    lines = [
        "| combination | Python | torch | Transformers | tests | passed | failed | skipped | date |",
        "|---|---|---|---|---|--:|--:|--:|---|",
    ]
    for each in outcomes:
        cells = (each.combination, each.python, each.torch, each.transformers, each.selection)
        counts = (f"{each.passed:,}", f"{each.failed:,}", f"{each.skipped:,}", each.date)
        lines.append(f"| {' | '.join((*cells, *counts))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
