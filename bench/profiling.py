"""Measures the cost of `drivetrain profile`: a step with the profiler against one without it.

    python -m bench.profiling

The three runs take turns, in new processes each time. Seconds a step are those that the command itself reports: of ten
steps without the profiler and ten with it, in one process, on the slowest rank. All of the command holds its start,
which imports PyTorch, the warm-up, both parts and the pages. The traces are those of all ranks, compressed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.tables import machine_line, markdown_table, write
from tests.launch.test_start import command

BENCH = Path(__file__).resolve().parent
STEPS = 10
LLAMA = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
SFT: dict[str, Any] = {
    "workload": {
        "type": "language_model",
        "stage": "sft",
        "model": {"tokenizer": "bytes", "config": LLAMA},
        "data": {"train": "rows.jsonl", "template": "alpaca", "length": 512, "evaluation_fraction": 0.05},
    },
    "batch_size": 8,
    "loop": {"epochs": 2, "max_grad_norm": 1.0},
    "optimizer": {"name": "adamw", "lr": 0.003},
}
DIGITS = str(BENCH.parent / "recipes" / "digits.yaml")
CASES = {
    "digits": [DIGITS],
    "supervised fine-tuning, a Llama of 0.8 million parameters": ["sft.yaml"],
    "digits, DDP on two ranks": [DIGITS, "engine=ddp", "processes=2"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--output", type=Path, default=BENCH / "results" / "profile.md")
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="profiling-") as name:
        folder = Path(name)
        (folder / "sft.yaml").write_text(json.dumps(SFT))
        rows = [
            {"instruction": f"Count to {number}", "output": " ".join(map(str, range(number)))}
            for number in range(1, 100)
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 5))
        for _ in range(given.times):
            for case, words in CASES.items():
                found.setdefault(case, []).append(profiled(folder, words))
                print(case, found[case][-1], flush=True)
    write(given.output, page(found))


def profiled(folder: Path, words: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=folder) as output:
        line = command("profile", *words, "device=cpu", "--steps", str(STEPS), "--json", "--output", output)
        began = time.perf_counter()
        done = subprocess.run(line, cwd=folder, check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        found = json.loads(done.stdout[done.stdout.index("{") :])
        size = sum(file.stat().st_size for file in Path(output).glob("*.trace.json.gz"))
    return {"plain": found["plain_seconds"], "profiled": found["profiled_seconds"], "all": seconds, "bytes": size}


def page(found: dict[str, list[dict[str, float]]]) -> str:
    head = ("run", "a step, ms", "with the profiler, ms", "more (its range)", "the command, s", "traces, MB")
    rows = []
    for case, times in found.items():
        more = [each["profiled"] / each["plain"] - 1 for each in times]
        rows.append(
            (
                case,
                *(f"{1e3 * statistics.median(each[name] for each in times):.1f}" for name in ("plain", "profiled")),
                f"{statistics.median(more):.0%} ({min(more):.0%} to {max(more):.0%})",
                f"{statistics.median(each['all'] for each in times):.0f}",
                f"{statistics.median(each['bytes'] for each in times) / 1e6:.1f}",
            )
        )
    about = "\n".join((__doc__ or "").splitlines()[4:]).strip()
    times = f"Medians of {len(next(iter(found.values())))} times."
    return "\n\n".join(("# What profiling costs", about, machine_line(), times, markdown_table(head, rows))) + "\n"


if __name__ == "__main__":
    main()
