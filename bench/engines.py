"""Each engine against the same engine written by hand: examples/plain/*.py and the run files beside them.

    python bench/engines.py

Samples a second in the steady state, as each side reports it. Both sides print and save nothing while they are timed,
but ours keeps its curve, its meters and its progress.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

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

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
PROCESSES = {"single": 1, "ddp": 2, "fsdp": 2, "zero2": 2, "accelerate_ddp": 2}
TARGET = 0.97


def main() -> None:
    parser = argparse.ArgumentParser(description="each engine against the same engine by hand")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--engines", nargs="+", default=list(PROCESSES), choices=list(PROCESSES))
    parser.add_argument("--output", type=Path, default=RESULTS / "engines.md")
    options = parser.parse_args()
    found: dict[str, list[Pair]] = {}
    for engine in options.engines:
        found[engine] = []
        for pair in repeat(lambda number, engine=engine: one_pair(engine, options.steps, number), options.pairs):
            found[engine].append(pair)
            print(f"{engine}  {pair.ratio:.3f}" + ("  (discarded)" if pair.disturbed else ""), flush=True)
        write(options.output, page(found, options.steps))


def one_pair(engine: str, steps: int, number: int) -> Pair:
    return in_turns(lambda: ours(engine, steps), lambda: by_hand(engine, steps), number)


def ours(engine: str, steps: int) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        settings = [f"output={folder}/run", f"loop.steps={steps}", f"evaluation.every_steps={steps}"]
        command = ["-m", "drivetrain", "train", f"examples/plain/{engine}.yaml", *settings, "--quiet"]
        foreign, _ = timed(command)
        report = json.loads((Path(folder) / "run" / "report.json").read_text())
    return Measurement(report["samples_per_second"], foreign)


def by_hand(engine: str, steps: int) -> Measurement:
    processes = PROCESSES[engine]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*(torchrun if processes > 1 else []), f"examples/plain/{engine}.py", str(steps)]
    foreign, said = timed(command, threads=None if processes == 1 else max(1, (os.cpu_count() or 1) // processes))
    return Measurement(json.loads(said.strip().splitlines()[-1])["samples_per_second"], foreign)


def timed(command: list[str], threads: int | None = None) -> tuple[float, str]:
    """Cores of foreign work meanwhile, and what the command printed. threads: torchrun leaves one a rank otherwise."""
    wait_until_idle()
    watch = ForeignWork()
    environment = child_environment() | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    done = subprocess.run(
        [sys.executable, *command], check=True, env=environment, cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    return watch.cores(), done.stdout


def page(found: dict[str, list[Pair]], steps: int) -> str:
    rows = []
    for engine, pairs in found.items():
        good = undisturbed(pairs)
        low, median, high = quartiles([pair.ratio for pair in good])
        reached = "reached" if median >= TARGET else "MISSED"
        count = f"{len(good)} of {len(pairs)}"
        rows.append([engine, str(PROCESSES[engine]), count, f"{median:.3f}", f"{low:.3f} to {high:.3f}", reached])
    head = ["engine", "ranks", "pairs kept", "median", "quartiles", f"target {TARGET}"]
    return "\n".join(
        [
            "# Each engine against the same engine by hand",
            "",
            "Samples a second of `drivetrain train examples/plain/<engine>.yaml` over those of the hand-written "
            f"`examples/plain/<engine>.py` (1.00: no cost); {steps} steps of a small convolutional network on digits, "
            "batch 64. Fresh processes in turns, order swapped from pair to pair. `python bench/engines.py` repeats "
            "it.",
            "",
            machine_line(),
            "",
            markdown_table(head, rows),
            "",
        ]
    )


if __name__ == "__main__":
    main()
