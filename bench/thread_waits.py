"""Measures how long threads of one operation should spin while they wait for each other, before they sleep.

    python -m bench.thread_waits

Each recipe is trained by `drivetrain train` with GOMP_SPINCOUNT=10000, by which waiting threads spin for about 0.2 ms,
and as it is, where PyTorch's spin for milliseconds. Once on an idle machine, and once beside as many busy Python
processes as there are cores. The two take turns, the order swaps, each in a new process. Rates are those of the run's
report, without its start.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.profiling import SFT
from bench.tables import machine_line, markdown_table, write
from drivetrain.runtime.hardware import usable_cores
from tests.launch.test_start import command

BENCH = Path(__file__).resolve().parent
WAYS: dict[str, dict[str, str]] = {"shortly": {"GOMP_SPINCOUNT": "10000"}, "default": {}}
CASES = {  # title → run file and overrides, of an idle machine
    "digits": [str(BENCH.parent / "recipes" / "digits.yaml"), "loop={steps: 200, epochs: null}"],
    "supervised fine-tuning, a Llama of 0.8 million parameters": ["sft.yaml", "loop={steps: 40, epochs: null}"],
}
FEWER = {200: 20, 40: 4}  # steps beside busy programs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=BENCH / "results" / "thread-waits.md")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="thread-waits-") as name:
        folder = Path(name)
        (folder / "sft.yaml").write_text(json.dumps(SFT))
        example = {"instruction": "Count", "output": " ".join(map(str, range(50)))}
        (folder / "rows.jsonl").write_text((json.dumps(example) + "\n") * 500)
        for beside in (0, usable_cores()):
            for title, words in CASES.items():
                with busy(beside):
                    rates = in_turns(folder, words if not beside else shorter(words), given.pairs)
                print(title, beside, rates, flush=True)
                rows.append(row(title, beside, rates))
    head = ("work", "busy programs beside it", "GOMP_SPINCOUNT=10000, samples/s", "default", "ratio (its range)")
    about = "\n".join((__doc__ or "").splitlines()[4:]).strip()
    parts = ("# Threads that wait for each other", about, machine_line(), markdown_table(head, rows))
    write(given.output, "\n\n".join(parts) + "\n")


def shorter(words: list[str]) -> list[str]:
    text = words[1]
    for many, few in FEWER.items():
        if f"steps: {many}," in text:
            return [words[0], text.replace(f"steps: {many},", f"steps: {few},")]
    raise ValueError(text)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keeps so many processes busy while the block runs."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def in_turns(folder: Path, words: list[str], pairs: int) -> dict[str, list[float]]:
    """Returns the samples a second of each way, each time."""
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(pairs):
        for name in WAYS if number % 2 == 0 else reversed(WAYS):
            found[name].append(rate(folder, words, WAYS[name]))
    return found


def rate(folder: Path, words: list[str], variables: dict[str, str]) -> float:
    own = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in own} | variables
    with tempfile.TemporaryDirectory(dir=folder) as output:
        line = command("train", *words, "device=cpu", f"output={output}/run", "--quiet")
        subprocess.run(line, cwd=folder, check=True, env=environment, stdout=subprocess.DEVNULL)
        report = json.loads((Path(output) / "run" / "report.json").read_text())
    return float(report["samples_per_second"])


def row(title: str, beside: int, rates: dict[str, list[float]]) -> tuple[str, ...]:
    ratios = [mine / other for mine, other in zip(rates["shortly"], rates["default"], strict=True)]
    figures = (f"{statistics.median(each):,.0f}" for each in rates.values())
    return (title, str(beside), *figures, f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
