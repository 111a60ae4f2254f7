"""Measures what watching a cell costs: the same run by `drivetrain train` and as the only cell of `drivetrain compare`.

    python bench/comparing.py

Both are timed by their own reports (the training loop's wall time), so that start-up is left out on both sides. The
parent of a cell looks at its memory and processor time twice a second meanwhile. Whole runs vary by some percent from
one to the next, more than is sought; so the processor time that the parent takes while it watches is told too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import run_files
import samples
from interleaved import (
    ForeignWork,
    Measurement,
    Pair,
    child_environment,
    in_turns,
    quartiles,
    repeat,
    undisturbed,
    wait_until_idle,
)
from tables import machine_line, markdown_table, write

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description="the cost of watching a cell")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, default=RESULTS / "comparing.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="comparing-") as folder:
        run_file = made_run(Path(folder), options.steps)
        pairs = []
        for pair in repeat(lambda number: one_pair(run_file, Path(folder), number), options.pairs):
            pairs.append(pair)
            print(f"{len(pairs)}  {pair.ratio:.3f}" + ("  (discarded)" if pair.disturbed else ""), flush=True)
        watched = watching(run_file, Path(folder))
    write(options.output, page(pairs, watched))


def made_run(folder: Path, steps: int) -> Path:
    images = samples.images(None, folder / "images", num_train=2560, num_evaluation=50)
    run: dict[str, Any] = {
        "workload": run_files.image_workload(images, depths=[1, 1, 1, 1]),
        "batch_size": 128,
        "loop": {"steps": steps},
        "evaluation": {"every_steps": steps},
    }
    return run_files.write_run(folder / "run.yaml", run)


def one_pair(run_file: Path, folder: Path, number: int) -> Pair:
    train = ["train", str(run_file), f"output={folder / 'train'}", "--overwrite"]
    compare = ["compare", str(run_file), "--output", str(folder / "compare"), "--fresh"]

    def compared() -> Measurement:
        return timed(compare, lambda: next((folder / "compare" / "cells").glob("*/run/report.json")))

    def alone() -> Measurement:
        return timed(train, lambda: folder / "train" / "report.json")

    shutil.rmtree(folder / "compare", ignore_errors=True)
    return in_turns(compared, alone, number)


def timed(arguments: list[str], report: Callable[[], Path]) -> Measurement:
    """The command is a child of ours with all its children: their work is its side's own."""
    wait_until_idle()
    watch = ForeignWork()
    command = [sys.executable, "-m", "drivetrain", *arguments]
    subprocess.run(command, check=True, env=child_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    foreign = watch.cores()
    found = json.loads(report().read_text())
    return Measurement(found["samples"] / found["seconds"], foreign)


WATCHING = """
import json, sys, time
from pathlib import Path
from drivetrain.compare import runner, verbs
from drivetrain.compare.cell_process import Limits
from drivetrain.compare.matrix import Job

watch = runner.run_matrix
def timed(*given):
    used, at = time.process_time(), time.perf_counter()
    found = watch(*given)
    print(json.dumps([time.process_time() - used, time.perf_counter() - at]))
    return found
verbs.run_matrix = timed
verbs.compare(Path(sys.argv[1]), [], Path(sys.argv[2]), 1, Job("train", None), Limits(), runner.Again.ALL)
"""


def watching(run_file: Path, folder: Path) -> float:
    """Processor time of the parent over the wall time that it watched the cell."""
    command = [sys.executable, "-c", WATCHING, str(run_file), str(folder / "watched")]
    done = subprocess.run(
        command, check=True, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    used, seconds = json.loads(done.stdout.strip().splitlines()[-1])
    return float(used / seconds)


def page(pairs: list[Pair], watched: float) -> str:
    good = undisturbed(pairs)
    low, median, high = quartiles([pair.ratio for pair in good])
    rows = [
        [str(number), f"{pair.ours.rate:.1f}", f"{pair.theirs.rate:.1f}", f"{pair.ratio:.3f}"]
        for number, pair in enumerate(pairs, 1)
    ]
    return "\n".join(
        [
            "# What watching a cell costs",
            "",
            "Samples a second of the training loop as a cell of `drivetrain compare`, over the same run by `drivetrain "
            "train` (1.000 = no cost). Fresh processes in turns. `python bench/comparing.py` repeats it.",
            "",
            machine_line(),
            "",
            f"Median of {len(good)} undisturbed pairs of {len(pairs)}: **{median:.3f}**, quartiles {low:.3f} to "
            f"{high:.3f}.",
            "",
            f"The parent's processor time while it watched a cell: **{watched:.2%}** of the cell's wall time.",
            "",
            markdown_table(["pair", "as a cell, samples/s", "alone, samples/s", "ratio"], rows),
            "",
        ]
    )


if __name__ == "__main__":
    main()
