"""Measures how long it takes until the first step: from the command to the end of it, beside a plain script of the same
model.

    python bench/startup.py
    python bench/startup.py --pairs 9 --cases net texts-ddp

Fresh processes in turns, order swapped from pair to pair; pairs that other work disturbed are discarded. Both sides
read the same data; what drivetrain does beside (checks, a run folder, measuring) lies within. Then what is imported
until then, by `python -X importtime`: the dearest modules of each side.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import samples
from first_step import VARIABLE
from interleaved import (
    BENCH,
    ForeignWork,
    Measurement,
    Pair,
    child_environment,
    failed,
    in_turns,
    quartiles,
    repeat,
    undisturbed,
    wait_until_idle,
)
from run_files import text_workload
from tables import machine_line, markdown_table, write

RESULTS = BENCH / "results" / "startup.md"
GOAL = 1.1  # times the plain script's seconds
LIMIT_CORES = 0.15  # of so short runs
TOP = 12  # modules of a table
IMPORT = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \|(\s+)(\S+)")


@dataclass(frozen=True)
class Case:
    kind: str
    processes: int
    what: str


CASES = {
    "net": Case("net", 1, "a small convolutional network, one process"),
    "net-ddp": Case("net", 2, "the same on two ranks of ddp"),
    "texts": Case("texts", 1, "BERT 2 x 128 on 2,000 texts, one process"),
    "texts-ddp": Case("texts", 2, "the same on two ranks of ddp"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="time to the first step, beside a plain script")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--pairs", type=int, default=5, help="undisturbed pairs a case")
    parser.add_argument("--attempts", type=int, help="most pairs a case; left out, twice --pairs")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    found: dict[str, list[Pair]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name in options.cases:
            run_file = written(CASES[name], work / name)
            found[name] = []
            one_pair(CASES[name], run_file, 0)  # writes byte code and warms the disk's cache; not counted
            for pair in repeat(lambda n, r=run_file, c=CASES[name]: one_pair(c, r, n), options.pairs, options.attempts):
                found[name].append(pair)
                taken = f"{1 / pair.ours.rate:.2f} s, plain {1 / pair.theirs.rate:.2f} s"
                print(f"{name}: {taken}; processor time {processor_ratio(pair):.2f}", flush=True)
        imports = {
            name: [imported(command, run_file.parent) for command in commands(CASES[name], run_file, importtime=True)]
            for name in options.cases
            if CASES[name].processes == 1
            for run_file in [work / name / "run.json"]
        }
    write(options.output, page(found, imports))


def written(case: Case, folder: Path) -> Path:
    folder.mkdir()
    run: dict[str, Any] = {
        "workload": {"type": "module", "path": str(BENCH / "startup_net.py")},
        "batch_size": 64,
        "loop": {"steps": 1, "max_grad_norm": 1.0},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "tracking": {"log_every": 1, "trackers": ["progress", "first_step_tracker:FirstStep"]},
        "output": str(folder / "run"),
    }
    if case.processes > 1:
        run |= {"engine": "ddp", "processes": case.processes}
    if case.kind == "texts":
        data = samples.texts(None, None, folder / "texts", 2000, 10)
        run["workload"] = text_workload(data, 2, 128, 64, folder / "cache")
        del run["workload"]["data"]["evaluation"]
    path = folder / "run.json"
    path.write_text(json.dumps(run))
    return path


def commands(case: Case, run_file: Path, importtime: bool = False) -> tuple[list[str], list[str]]:
    """Ours and the plain script's."""
    python = [sys.executable, *(["-X", "importtime"] if importtime else [])]
    ours = [*python, "-m", "drivetrain", "train", str(run_file), "--overwrite"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.processes)]
    plain = [*python, *(launcher if case.processes > 1 else []), str(BENCH / "plain_startup.py"), case.kind]
    return ours, [*plain, str(run_file)]


def one_pair(case: Case, run_file: Path, number: int) -> Pair:
    ours, plain = commands(case, run_file)
    return in_turns(lambda: first_step(ours, run_file), lambda: first_step(plain, run_file), number, LIMIT_CORES)


def first_step(command: list[str], run_file: Path) -> Measurement:
    """rate: first steps a second."""
    wait_until_idle()
    stamp, log = run_file.with_name("stamp"), run_file.with_name("log")
    stamp.unlink(missing_ok=True)
    watch, start = ForeignWork(), time.time()
    with log.open("w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment(stamp), check=False)
    if done.returncode != 0 or not stamp.exists():
        raise failed(" ".join(command[1:4]), done.returncode, log)
    end, processor = map(float, stamp.read_text().split())
    return Measurement(1 / (end - start), watch.cores(), {"processor_seconds": processor})


def environment(stamp: Path) -> dict[str, str]:
    more = child_environment(**{VARIABLE: str(stamp)})
    more.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # an installed package has its byte code; else it is compiled at each start
    return {**more, "PYTHONPATH": f"{BENCH}:{more['PYTHONPATH']}", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": ""}


def imported(command: list[str], folder: Path) -> list[tuple[str, float]]:
    """(module, seconds with all that it brings): the dearest ones that no dearer one of the list brought."""
    stamp = folder / "stamp"
    done = subprocess.run(command, capture_output=True, text=True, env=environment(stamp), check=True)
    lines = [match for match in map(IMPORT.match, done.stderr.splitlines()) if match]
    found: list[tuple[str, float]] = []
    inside = 0
    for match in reversed(lines):  # a module comes after what it brought
        depth, seconds = len(match[3]), int(match[2]) / 1e6
        if inside and depth > inside:
            continue
        inside = 0
        if (
            not match[4].startswith("drivetrain") and seconds > 0.01
        ):  # of our own modules, those that they import are listed
            found.append((match[4], seconds))
            inside = depth
    return sorted(found, key=lambda each: -each[1])[:TOP]


def page(found: dict[str, list[Pair]], imports: dict[str, list[list[tuple[str, float]]]]) -> str:
    rows = []
    for name, pairs in found.items():
        good = undisturbed(pairs)
        if not good:
            rows.append([CASES[name].what, f"0 of {len(pairs)}", "", "", "", middle_of(map(processor_ratio, pairs))])
            continue
        ours, plain = (quartiles([1 / side.rate for side in sides])[1] for sides in sides_of(good))
        low, middle, high = quartiles([1 / pair.ratio for pair in good])
        verdict = "reached" if middle <= GOAL else "MISSED"
        ratio = f"{middle:.2f} ({low:.2f} to {high:.2f}), {verdict}"
        rows.append([CASES[name].what, f"{len(good)} of {len(pairs)}", f"{ours:.2f}", f"{plain:.2f}", ratio])
        rows[-1].append(middle_of(map(processor_ratio, good)))
    head = ["case", "pairs kept", "seconds", "plain script", f"ratio (quartiles), goal {GOAL}", "processor time"]
    parts = ["# Time to the first step", __doc__.split("\n\n")[2] if __doc__ else "", machine_line()]
    parts.append(markdown_table(head, rows))
    for name, (ours_modules, plain_modules) in imports.items():
        parts.append(f"Imports of {CASES[name].what}, seconds with all that a module brings:")
        pairs_of = [(ours_modules, "drivetrain"), (plain_modules, "plain script")]
        for modules, side in pairs_of:
            parts.append(markdown_table([side, "seconds"], [[module, f"{s:.2f}"] for module, s in modules]))
    return "\n\n".join(parts) + "\n"


def processor_ratio(pair: Pair) -> float:
    """Processor seconds of all processes until then, ours over the plain script's: steadier than the clock."""
    return float(pair.ours.facts["processor_seconds"] / pair.theirs.facts["processor_seconds"])


def middle_of(values: Iterable[float]) -> str:
    return f"{statistics.median(values):.2f}"


def sides_of(pairs: list[Pair]) -> tuple[list[Measurement], list[Measurement]]:
    return [pair.ours for pair in pairs], [pair.theirs for pair in pairs]


if __name__ == "__main__":
    main()
