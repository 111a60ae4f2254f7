"""A language model of half a billion parameters, engine by engine, beside the loop that one writes by hand.

    python bench/real_size.py
    python bench/real_size.py --cases single fsdp --rounds 2

The shape of Qwen2.5-0.5B (494 million parameters, tied embeddings, a vocabulary of 151,936) with random weights, in
bf16-mixed, two samples of 64 tokens a step. Each side is a process of its own (or two ranks on one machine), in turns;
what is compared is the least time of a step after the first, and the peak resident memory of rank 0 until the last
step. Nothing is saved or evaluated on either side. Each row says how much processor time other programs took meanwhile.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml
from interleaved import BENCH, ForeignWork, child_environment
from plain_real_size import GLOBAL_BATCH, LENGTH, LORA, LR, STEPS
from real_size_tracker import VARIABLE
from tables import machine_line, markdown_table, write

RESULTS = BENCH / "results" / "real_size.md"
LIMIT_SECONDS = 600
SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
ADAPTER = {"adapter": {"method": "lora", "rank": LORA["r"], "alpha": LORA["lora_alpha"]}}
CASES: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp": {"engine": "ddp", "processes": 2},
    "fsdp": {"engine": "fsdp", "processes": 2},
    "zero2": {"engine": "zero2", "processes": 2},
    "zero3": {"engine": "zero3", "processes": 2},
    "tp": {"engine": "mesh-tp2", "processes": 2},
    "pp": {"engine": "mesh-pp2", "processes": 2},
    "lora": ADAPTER,
    "qlora": {**ADAPTER, "quantised_base": {"format": "nf4"}},
}
Found = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="a language model of half a billion parameters, engine by engine")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=1, help="times that each side runs")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="real-size-") as folder:
        work = Path(folder)
        make_model(work)
        for case in options.cases:
            found: dict[str, list[Found]] = {"ours": [], "plain": []}
            for number in range(options.rounds):
                for side in ("ours", "plain") if number % 2 else ("plain", "ours"):
                    threads = "1" if "processes" in CASES[case] else "2"
                    found[side].append(measured(command(side, case, work), work, threads))
                    print(case, side, found[side][-1], flush=True)
            rows.append(row(case, found["ours"], found["plain"]))
            write(options.output, page(rows))


def make_model(work: Path) -> None:
    """Writes the model's folder, with a tokenizer of bytes, and a text, in a process of its own: two ranks of plain
    DeepSpeed leave no gigabyte of this machine to the bench."""
    making = multiprocessing.get_context("spawn").Process(target=written_model, args=(work,))
    making.start()
    making.join()
    if making.exitcode:
        raise RuntimeError(f"the model could not be made: exit code {making.exitcode}")


def written_model(work: Path) -> None:
    import torch
    import transformers

    from drivetrain.data.language.vocabularies import byte_tokenizer

    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE)).to(torch.bfloat16)
    model.save_pretrained(work / "model")
    byte_tokenizer(["<|endoftext|>"]).save_pretrained(work / "model")
    (work / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(400)))


def command(side: str, case: str, work: Path) -> list[str]:
    settings = CASES[case]
    if side == "plain":
        script = [str(BENCH / "plain_real_size.py"), case, str(work / "model"), str(work / "text.txt")]
        if settings.get("processes", 1) == 1:
            return [sys.executable, *script]
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    run = {
        "workload": {
            "type": "language_model",
            "stage": "pretrain",
            "model": {"path": str(work / "model")},
            "data": {"train": str(work / "text.txt"), "length": LENGTH, "evaluation_fraction": 0},
        },
        "precision": "bf16-mixed",
        "batch_size": GLOBAL_BATCH,
        "loop": {"steps": STEPS + 1},  # the bench ends it before the last one is saved
        "optimizer": {"name": "adamw", "lr": LR},
        "tracking": {"log_every": 1, "trackers": ["progress", "real_size_tracker:StepTracker"]},
        "checkpoints": {"every_steps": 1000},
        "output": str(work / "out"),
        **settings,
    }
    (work / "run.yaml").write_text(yaml.safe_dump(run))
    return [sys.executable, "-m", "drivetrain", "train", str(work / "run.yaml"), "--overwrite", "--quiet"]


def measured(args: Sequence[str], work: Path, threads: str) -> Found:
    """Returns seconds of a step, peak in bytes, seconds from the start to the first step, and the cores that other
    programs used meanwhile; the error where it fails."""
    steps = work / "steps.jsonl"
    steps.unlink(missing_ok=True)
    environment = child_environment() | {VARIABLE: str(steps), "OMP_NUM_THREADS": threads}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BENCH), environment.get("PYTHONPATH", "")]))
    start, watch = time.monotonic(), ForeignWork()
    with (work / "said.txt").open("w") as said:
        running = subprocess.Popen(args, cwd=work, env=environment, stdout=said, stderr=subprocess.STDOUT)
        while running.poll() is None and len(read(steps)) < STEPS and time.monotonic() - start < LIMIT_SECONDS:
            time.sleep(0.2)
        with suppress(subprocess.TimeoutExpired):
            running.wait(20 if "drivetrain" not in args else 0)
        used = seconds_below(running.pid)
        running.kill()  # drivetrain's ranks end with it
        running.wait()
    foreign = watch.cores(used)
    noted = read(steps)
    if len(noted) < STEPS:
        return {"error": (work / "said.txt").read_text().strip()[-400:]}
    times = [after["seconds"] - before["seconds"] for before, after in pairwise(noted)]
    wait_for_memory()
    return {
        "step": min(times),
        "peak": noted[STEPS - 1]["peak"],
        "first": noted[0]["seconds"] - start,
        "foreign": foreign,
        "losses": [round(each["loss"], 4) for each in noted[:STEPS]],
    }


def seconds_below(pid: int) -> float:
    """Returns the processor time of a process's children, whom it will not have waited for when it is killed."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
    return total


def read(steps: Path) -> list[dict[str, Any]]:
    lines = steps.read_text().splitlines(keepends=True) if steps.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_memory() -> None:
    """Ranks of a killed launcher end within seconds."""
    time.sleep(3)


def row(case: str, ours: Sequence[Found], plain: Sequence[Found]) -> list[str]:
    if any("error" in each for each in ours):
        return [case, "failed", *[""] * 7]
    own = middle(ours)
    if any("error" in each for each in plain):
        peak, step, first = f"{own['peak'] / 1e9:.1f}", f"{own['step']:.2f}", f"{own['first']:.0f}"
        return [case, peak, "failed", "", step, "failed", "", first, f"{foreign_cores(ours):.2f}"]
    theirs = middle(plain)
    return [
        case,
        f"{own['peak'] / 1e9:.1f}",
        f"{theirs['peak'] / 1e9:.1f}",
        f"{own['peak'] / theirs['peak']:.2f}",
        f"{own['step']:.2f}",
        f"{theirs['step']:.2f}",
        f"{own['step'] / theirs['step']:.2f}",
        f"{own['first']:.0f} / {theirs['first']:.0f}",
        f"{foreign_cores([*ours, *plain]):.2f}",
    ]


def foreign_cores(found: Sequence[Found]) -> float:
    return max(float(each["foreign"]) for each in found)


def middle(found: Sequence[Found]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in found) for name in ("peak", "step", "first")}


def page(rows: list[list[str]]) -> str:
    head = ["case", "GB", "plain GB", "ratio", "s a step", "plain", "ratio", "s to the first step (plain)"]
    head.append("foreign cores")
    return "\n".join(
        [
            "# A model of half a billion parameters",
            "",
            "Qwen2.5-0.5B's shape with random weights, bf16-mixed, two samples of 64 tokens a step; engines other than",
            "single, LoRA and QLoRA on two ranks of one machine. GB: peak resident memory of rank 0, to the last step,",
            f"imports included. Seconds: the quickest of steps 2 to {STEPS}. Ratios below 1: drivetrain takes less.",
            "Foreign cores: the most that other programs used during a run of either side.",
            "`python bench/real_size.py` repeats it.",
            "",
            machine_line(),
            "",
            markdown_table(head, rows),
            "",
        ]
    )


if __name__ == "__main__":
    main()
