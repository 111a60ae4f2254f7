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
from collections.abc import Iterator
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
    options = arguments("each engine against the same engine by hand", PROCESSES, "engines.md", 80)
    for found in compared(options):
        write(options.output, page(found, options.steps))


def arguments(title: str, names: dict[str, int], file: str, steps: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--engines", nargs="+", default=list(names), choices=list(names))
    parser.add_argument("--output", type=Path, default=RESULTS / file)
    return parser.parse_args()


def compared(options: argparse.Namespace, *settings: str) -> Iterator[dict[str, list[Pair]]]:
    """The pairs of each engine so far, after each engine. settings: beside those of our run files."""
    found: dict[str, list[Pair]] = {}
    for engine in options.engines:
        found[engine] = []
        for pair in repeat(
            lambda number, engine=engine: one_pair(engine, options.steps, number, *settings), options.pairs
        ):
            found[engine].append(pair)
            print(f"{engine}  {pair.ratio:.3f}" + ("  (discarded)" if pair.disturbed else ""), flush=True)
        yield found


def one_pair(engine: str, steps: int, number: int, *settings: str) -> Pair:
    return in_turns(lambda: ours(engine, steps, *settings), lambda: by_hand(engine, steps), number)


def ours(engine: str, steps: int, *more: str) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        settings = [f"output={folder}/run", f"loop.steps={steps}", f"evaluation.every_steps={steps}", *more]
        command = ["-m", "drivetrain", "train", f"examples/plain/{engine}.yaml", *settings, "--quiet"]
        foreign, _ = timed(command)
        report = json.loads((Path(folder) / "run" / "report.json").read_text())
    return Measurement(report["samples_per_second"], foreign)


def by_hand(engine: str, steps: int) -> Measurement:
    processes = PROCESSES.get(engine, 2)
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


def ratios(found: dict[str, list[Pair]]) -> str:
    rows = []
    for engine, pairs in found.items():
        good = undisturbed(pairs)
        if not good:
            rows.append([engine, str(PROCESSES.get(engine, 2)), f"0 of {len(pairs)}", "", "", "unknown"])
            continue
        low, median, high = quartiles([pair.ratio for pair in good])
        reached = "reached" if median >= TARGET else "MISSED"
        count = f"{len(good)} of {len(pairs)}"
        rows.append(
            [engine, str(PROCESSES.get(engine, 2)), count, f"{median:.3f}", f"{low:.3f} to {high:.3f}", reached]
        )
    return markdown_table(["engine", "ranks", "pairs kept", "median", "quartiles", f"target {TARGET}"], rows)


def page(found: dict[str, list[Pair]], steps: int) -> str:
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
            ratios(found),
            "",
        ]
    )


if __name__ == "__main__":
    main()
