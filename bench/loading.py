"""How long a model of half a billion parameters takes to be gone on with and to be evaluated, and how much memory.

    python bench/loading.py
    python bench/loading.py --rounds 3

Beside it what one writes by hand with Transformers (plain_loading.py). Model and batch are real_size.py's. Each side
is a process of its own, in turns: a run of one step is saved, then resumed for two more, then its checkpoint is
evaluated. What is resumed is measured until its second step, what is evaluated to the end of the process; imports
included.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from interleaved import BENCH, child_environment, failed
from plain_real_size import GLOBAL_BATCH, LENGTH, LR
from real_size import make_model, read
from real_size_tracker import VARIABLE
from tables import machine_line, markdown_table, write

RESULTS = BENCH / "results" / "loading.md"
EVALUATED = 8  # samples, of LENGTH tokens
MEASURED = ("resume", "evaluate")


def main() -> None:
    parser = argparse.ArgumentParser(description="going on with and evaluating a model of half a billion parameters")
    parser.add_argument("--rounds", type=int, default=1, help="times that each side runs")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="loading-") as folder:
        work = Path(folder)
        make_model(work)
        write_run_file(work)
        for side in ("plain", "ours"):
            timed(side, "save", work)
        found: dict[tuple[str, str], list[dict[str, float]]] = {}
        for number in range(options.rounds):
            for verb in reversed(MEASURED):  # what is resumed has other weights afterwards
                for side in ("ours", "plain") if number % 2 else ("plain", "ours"):
                    found.setdefault((side, verb), []).append(timed(side, verb, work, 3 + 2 * number))
                    print(verb, side, found[side, verb][-1], flush=True)
        write(options.output, page([row(verb, found["ours", verb], found["plain", verb]) for verb in MEASURED]))


def write_run_file(work: Path) -> None:
    data = {"train": str(work / "text.txt"), "length": LENGTH, "evaluation": str(work / "held_out.txt")}
    text = (work / "text.txt").read_text()
    (work / "held_out.txt").write_text(text[: EVALUATED * (LENGTH + 1)])
    run = {
        "workload": {
            "type": "language_model",
            "stage": "pretrain",
            "model": {"path": str(work / "model")},
            "data": data,
        },
        "precision": "bf16-mixed",
        "batch_size": GLOBAL_BATCH,
        "loop": {"steps": 1},
        "optimizer": {"name": "adamw", "lr": LR},
        "tracking": {"log_every": 1, "trackers": ["progress", "real_size_tracker:StepTracker"]},
        "checkpoints": {"every_steps": 1000},
        "output": str(work / "ours"),
    }
    (work / "run.yaml").write_text(yaml.safe_dump(run))


def command(side: str, verb: str, work: Path, last: int) -> list[str]:
    if side == "plain":
        return [
            *(sys.executable, str(BENCH / "plain_loading.py"), verb),
            *map(str, (work / "model", work / "text.txt", work / "plain")),
        ]
    ours = [sys.executable, "-m", "drivetrain"]
    run_file = str(work / "run.yaml")
    return {
        "save": [*ours, "train", run_file, "--quiet"],
        "resume": [*ours, "train", run_file, "--quiet", "--resume", f"loop.steps={last}"],
        "evaluate": [*ours, "evaluate", run_file, "--checkpoint", "last"],
    }[verb]


def timed(side: str, verb: str, work: Path, last: int = 1) -> dict[str, float]:
    """Returns {"seconds", "peak" in bytes}: until the second step of what is resumed, of the whole process otherwise.

    last: the step at which drivetrain's run ends.
    """
    (work / "plain").mkdir(exist_ok=True)
    steps = work / "steps.jsonl"
    steps.unlink(missing_ok=True)
    environment = child_environment(**{VARIABLE: str(steps)})
    log = work / "log.txt"
    start = time.monotonic()
    with log.open("w") as out:
        running = subprocess.Popen(command(side, verb, work, last), cwd=BENCH, env=environment, stdout=out, stderr=out)
        peak = 0
        while running.poll() is None:
            peak = max(peak, resident_peak(running.pid))
            time.sleep(0.05)
    if running.returncode:
        raise failed(f"{side} {verb}", running.returncode, log)
    seconds = time.monotonic() - start
    if verb == "resume":
        noted = read(steps)[-1]
        seconds, peak = noted["seconds"] - start, noted["peak"]
    return {"seconds": seconds, "peak": peak}


def resident_peak(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def row(verb: str, ours: Sequence[dict[str, float]], plain: Sequence[dict[str, float]]) -> list[str]:
    def middle(found: Sequence[dict[str, float]], name: str) -> float:
        return statistics.median(each[name] for each in found)

    seconds, plain_seconds = middle(ours, "seconds"), middle(plain, "seconds")
    peak, plain_peak = middle(ours, "peak"), middle(plain, "peak")
    return [
        {"resume": "resumed, two steps", "evaluate": f"evaluated, {EVALUATED} samples"}[verb],
        *(f"{seconds:.1f}", f"{plain_seconds:.1f}", f"{seconds / plain_seconds:.2f}"),
        *(f"{peak / 1e9:.1f}", f"{plain_peak / 1e9:.1f}", f"{peak / plain_peak:.2f}"),
    ]


def page(rows: list[list[str]]) -> str:
    head = ["a run of 494M parameters", "s", "plain", "ratio", "GB", "plain", "ratio"]
    lines = [
        "# Going on with a model of half a billion parameters, and evaluating it",
        "",
        "From the start of the process to the second step, or to its end; bf16-mixed on one process; plain:",
        "Transformers' from_pretrained, torch's AdamW and torch.load. Ratios below 1: drivetrain takes less.",
        "`python bench/loading.py` repeats it.",
        "",
        machine_line(),
        "",
        markdown_table(head, rows),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
