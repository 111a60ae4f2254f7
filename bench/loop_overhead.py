"""Measures what drivetrain's loop costs: samples a second against a plain PyTorch loop that does the same work.

    python bench/loop_overhead.py
    python bench/loop_overhead.py --images CIFAR-10-images --text reviews.csv --vocab vocab.txt

Both sides read the same run file: same model, batches, optimizer, clipping, precision and malloc setting; the losses
are compared, so that "the same work" is seen and not claimed. Two fresh processes a pair, in turns of ten steps (see
lockstep.py); the first ten steps are not timed. So interpreter, imports, data reading, drivetrain's one instrumented
step, evaluation and saving lie outside. Points of the curve, progress display, events.jsonl and the utilisation sampler
lie inside.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import run_files
import samples
from interleaved import Pair, quartiles, repeat, undisturbed
from lockstep import TURN_LIMIT_CORES, Child, lockstep
from tables import machine_line, markdown_table, write
from turns import TRACKER

RESULTS = Path(__file__).resolve().parent / "results"
STEPS_A_TURN = 10  # drivetrain's default distance of two points of the curve
SAME_LOSS = {"fp32": 1e-3, "bf16-mixed": 2e-2}  # relative, at the last step: rounding, grown over all steps


@dataclass(frozen=True)
class Case:
    name: str
    run: dict[str, Any]


def main() -> None:
    options = parse()
    rows, summary = [], []
    with tempfile.TemporaryDirectory(prefix="loop-overhead-") as folder:
        for case in cases(options, Path(folder)):
            pairs = []
            for pair in measured(case, Path(folder), options):
                pairs.append(pair)
                rows.append(pair_row(case, len(pairs), pair))
                print("  ".join(rows[-1]), flush=True)
            summary.append(summary_row(case, pairs))
    write(options.output, page(options, summary, rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="drivetrain's loop against a plain PyTorch loop")
    parser.add_argument("--pairs", type=int, default=9, help="undisturbed pairs a case")
    parser.add_argument("--turns", type=int, default=12, help="timed turns of 10 steps a pair and side")
    parser.add_argument("--workloads", nargs="+", default=["images", "texts"], choices=["images", "texts"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16-mixed"])
    parser.add_argument("--images", type=Path, help="folder with train/ and test/ of class folders; left out, made")
    parser.add_argument("--text", type=Path, help="CSV with the columns review and label; left out, made")
    parser.add_argument("--vocab", type=Path, help="WordPiece vocab.txt for --text")
    parser.add_argument("--attempts", type=int, help="most pairs a case; left out, twice --pairs")
    parser.add_argument("--output", type=Path, default=RESULTS / "loop_overhead.md")
    return parser.parse_args()


def cases(options: argparse.Namespace, folder: Path) -> Iterator[Case]:
    workloads = {}
    if "images" in options.workloads:
        images = samples.images(options.images, folder / "images", num_train=2560, num_evaluation=50)
        workloads["images"] = run_files.image_workload(images, depths=[1, 1, 1, 1]), 128
    if "texts" in options.workloads:
        texts = samples.texts(options.text, options.vocab, folder / "texts", num_train=2560, num_evaluation=50)
        whole = {"group_by_length": False, "unpadded": False}  # the plain loop runs its batches whole
        workloads["texts"] = run_files.text_workload(texts, 2, 128, 128, folder / "cache", **whole), 32
    for name, (workload, batch) in workloads.items():
        for precision in options.precisions:
            steps = STEPS_A_TURN * (1 + options.turns)
            run = {
                "workload": workload,
                "precision": precision,
                "batch_size": batch,
                "loop": {"steps": steps, "max_grad_norm": 1.0},
                "optimizer": {"name": "adamw", "lr": 5e-4},
                "evaluation": {"every_steps": steps},
                "tracking": {"trackers": ["progress", TRACKER]},
                "output": str(folder / "run"),
            }
            yield Case(f"{name} {precision}", run)


def measured(case: Case, folder: Path, options: argparse.Namespace) -> Iterator[Pair]:
    run_file = run_files.write_run(folder / "run.yaml", case.run)

    def pair(number: int) -> Pair:
        ours = Child("ours.py", run_file, folder / "ours.json")
        plain = Child("plain_loop.py", run_file, folder / "plain.json")
        samples_a_turn = STEPS_A_TURN * case.run["batch_size"]
        return lockstep(ours, plain, options.turns, samples_a_turn, swap=number % 2 == 1)

    return repeat(pair, options.pairs, options.attempts)


def loss_difference(pair: Pair) -> float:
    """Largest relative difference over the points of the curve."""
    plain = pair.theirs.facts["losses"]
    differences = [abs(loss / plain[step] - 1) for step, loss in pair.ours.facts["losses"].items()]
    return max(differences, default=math.nan)


def processor_ratio(pair: Pair) -> float:
    """Processor time instead of the clock's, plain over drivetrain: steadier, and it counts all threads."""
    return float(pair.theirs.facts["processor_seconds"] / pair.ours.facts["processor_seconds"])


def pair_row(case: Case, number: int, pair: Pair) -> list[str]:
    return [
        case.name,
        str(number),
        f"{pair.ours.rate:.1f}",
        f"{pair.theirs.rate:.1f}",
        f"{pair.ratio:.3f}",
        f"{processor_ratio(pair):.3f}",
        f"{pair.ours.facts['quiet_turns']} of {pair.ours.facts['turns']}" + (" (discarded)" if pair.disturbed else ""),
        f"{loss_difference(pair):.1e}",
    ]


def summary_row(case: Case, pairs: list[Pair]) -> list[str]:
    good = undisturbed(pairs)
    name = case.name + (" (emulated)" if pairs[0].ours.facts["emulated"] else "")
    if not good:
        return [name, f"0 of {len(pairs)}", *["no undisturbed pair"] * 5]
    low, median, high = quartiles([pair.ratio for pair in good])
    difference = max(map(loss_difference, pairs))
    same = "same" if difference <= SAME_LOSS.get(case.run["precision"], 2e-2) else "NOT THE SAME WORK"
    count = f"{len(good)} of {len(pairs)}"
    processor = f"{statistics.median(map(processor_ratio, good)):.3f}"
    spread, overhead = f"{low:.3f} to {high:.3f}", f"{1 / median - 1:+.1%}"
    return [name, count, f"{median:.3f}", spread, overhead, processor, f"{same}: {difference:.1e}"]


def page(options: argparse.Namespace, summary: list[list[str]], rows: list[list[str]]) -> str:
    made = "made" if options.images is None else "real", "made" if options.text is None else "real"
    head = ["work", "pairs kept", "median ratio", "quartiles", "overhead", "processor time", "largest loss difference"]
    each = ["work", "pair", "drivetrain, samples/s", "plain loop, samples/s", "ratio", "processor time", "quiet turns"]
    each += ["loss difference"]
    return "\n".join(
        [
            "# What drivetrain's loop costs",
            "",
            "Samples a second of steady training steps, drivetrain over a plain PyTorch loop that does the same work "
            f"(1.000 = no cost). A pair is two fresh processes in {options.turns} turns of {STEPS_A_TURN} steps, order "
            f"swapped from turn to turn; turns with more than {TURN_LIMIT_CORES} cores of foreign work are left out on "
            'both sides, pairs with less than half of their turns quiet are discarded. "Processor time" is the same '
            "ratio of processor seconds. `python bench/loop_overhead.py` repeats it.",
            "",
            machine_line(),
            "",
            f"Images: half-width ResNet-10 at 32 px, batch 128, {made[0]} data. Texts: BERT 2 x 128, up to 128 tokens, "
            f'batch 32, {made[1]} data. AdamW (fused), clipping at 1. "Emulated": on this '
            "CPU both sides compute 16-bit products as rounded fp32 products.",
            "",
            markdown_table(head, summary),
            "",
            "## Every pair",
            "",
            markdown_table(each, rows),
            "",
        ]
    )


if __name__ == "__main__":
    main()
