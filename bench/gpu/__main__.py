"""The command behind `make gpu` and `make gpu-report`: python -m bench.gpu [PART] [--device cpu], or report.

Imports nothing but the standard library before it knows what is missing, and installs nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Sequence
from importlib import import_module

from bench.gpu.cases import Case
from bench.gpu.setting import ROOT, Setting, installed

PARTS = {
    "doctor": "machine",
    "tests": "suite",
    "parity": "parity",
    "stages": "stages",
    "resume": "resume",
    "plan": "planned",
    "generate": "generate",
    "bench-head": "head",
    "bench-sft": "sft",
    "bench-pretrain": "pretrain",
    "bench-images": "images",
    "bench-texts": "texts",
}
CHECKS = ("doctor", "tests", "parity", "stages", "resume")  # cases may run at once: of a hang alone the time counts
# what no part goes without; the rest of pyproject's dependencies is named where a case needs it
CORE = ("torch", "transformers", "tokenizers", "safetensors", "pydantic", "ruamel.yaml", "typer", "rich", "numpy")
CORE += ("psutil", "filelock", "jinja2", "pandas", "pyarrow")


def main() -> int:
    options = parse()
    missing = [name for name in dependencies() if installed(name) is None]
    if missing:
        print(f"not installed in {sys.executable}: {', '.join(missing)}")
    if absent := [name for name in CORE if name in missing]:
        print(f"no part can run without {', '.join(absent)}; nothing is installed by this command")
        return 1
    from bench.gpu import report, setting

    where = setting.here(options.device)
    if options.part == "report":
        return report.write_page(where)
    wanted = [options.part] if options.part else list(PARTS)
    asked = re.compile(options.cases)
    if options.again:
        for part in wanted:
            (where.folder / f"{part}.json").unlink(missing_ok=True)
    codes = [run(part, where, options.part is None, options.jobs if part in CHECKS else 1, asked) for part in wanted]
    return max(codes)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu", description="what one GPU shows of drivetrain")
    parser.add_argument("part", nargs="?", choices=[*PARTS, "report"], help="left out, all parts in order")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a rehearsal in small sizes")
    parser.add_argument("--again", action="store_true", help="forget the results of these parts")
    parser.add_argument(
        "--cases", default="", help="a regular expression: those whose names it is found in, and what they come after"
    )
    parser.add_argument("--jobs", type=int, default=1, help=f"cases at once, of {', '.join(CHECKS)}")
    return parser.parse_args()


def dependencies() -> list[str]:
    """Names of the packages that pyproject.toml asks for."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        given = tomllib.load(file)["project"]["dependencies"]
    return [line.partition(">")[0].strip() for line in given]


def run(part: str, where: Setting, until_done: bool, jobs: int, asked: re.Pattern[str]) -> int:
    """Runs a part once, or until nothing is left of it. Returns the exit code: 1 where a case failed or missed."""
    from bench.gpu.cases import BUDGET_SECONDS, NOT_DONE, Record, run_part

    record = Record(where.folder / f"{part}.json")
    every = import_module(f"bench.gpu.{PARTS[part]}").cases(where)
    cases = selected(every, asked)
    left = len(cases)
    while left:  # each pass tries at least one case that is left, and none is tried more than twice
        print(f"{part} on {where.device_name}", flush=True)
        left = run_part(cases, record, where, lambda line: print(line, flush=True), BUDGET_SECONDS, jobs)
        if not until_done:
            break
    if left:
        print(f"{left} of {len(cases)} cases are left: make gpu PART={part} goes on")
    bad = [case.name for case in cases if case.name in record.results and record.results[case.name].status in NOT_DONE]
    if bad:
        print(f"{part}: {len(bad)} failed or missed: {', '.join(bad)}")
    return int(bool(bad))


def selected(cases: Sequence[Case], asked: re.Pattern[str]) -> list[Case]:
    """Returns the cases whose names the pattern is found in, and all that those come after."""
    wanted = {case.name for case in cases if asked.search(case.name)}
    for case in reversed(cases):  # each stands behind those it comes after
        if case.name in wanted:
            wanted |= {*case.after}
    return [case for case in cases if case.name in wanted]


if __name__ == "__main__":
    sys.exit(main())
