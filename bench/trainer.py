"""drivetrain against the Transformers Trainer: samples a second of a whole training, and the accuracy it leads to.

    python bench/trainer.py --images CIFAR-10-images --text reviews.csv --vocab vocab.txt
    python bench/trainer.py        # with made data

Same data, model, batch size, optimizer (AdamW, no decay, clipping at 1), learning rate and its schedule (linear to 0,
no warm-up), number of samples and evaluation data on both sides. The rest is what a user of either gets: the Trainer
with its defaults, drivetrain with its own (batches cut by length, decoded images kept, channels-last, malloc that
keeps freed blocks). The clock runs from reading the data to the last step, with reading, decoding, tokenising and
saving on both sides; imports and evaluation are left out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import run_files
import samples
from interleaved import Measurement, Pair, add_options, in_turns, measure, quartiles, repeat, undisturbed
from tables import machine_line, markdown_table, write

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Case:
    name: str
    what: str
    target: float  # what the ratio is to reach
    run: dict[str, Any]


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        for case in cases(options, Path(folder)):
            pairs: list[Pair] = []
            for pair in measured(case, Path(folder), options):
                pairs.append(pair)
                print("  ".join(pair_row(len(pairs), pair)), flush=True)
            write(options.output / f"trainer-{case.name}.md", page(case, pairs, options))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="drivetrain against the Transformers Trainer")
    add_options(parser, pairs=5)
    parser.add_argument("--workloads", nargs="+", default=["images", "texts"], choices=["images", "texts"])
    parser.add_argument("--precision", default="fp32", help="fp32, bf16-mixed or fp16-mixed")
    parser.add_argument("--num-images", type=int, default=10_000, help="training images")
    parser.add_argument("--num-texts", type=int, help="training texts; left out, all of --text, or 2,000 made ones")
    parser.add_argument("--num-evaluation", type=int, default=2_000, help="evaluation samples")
    parser.add_argument("--image-epochs", type=int, default=4)
    parser.add_argument("--text-epochs", type=int, default=1)
    parser.add_argument("--max-length", type=int, default=128, help="tokens kept of a text")
    parser.add_argument("--workers", type=int, default=0, help="drivetrain's loader processes")
    parser.add_argument("--images", type=Path, help="folder with train/ and test/ of class folders; left out, made")
    parser.add_argument("--text", type=Path, help="CSV with the columns review and label; left out, made")
    parser.add_argument("--vocab", type=Path, help="WordPiece vocab.txt for --text")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder; a page each workload")
    return parser.parse_args()


def cases(options: argparse.Namespace, folder: Path) -> Iterator[Case]:
    if "images" in options.workloads:
        images = samples.images(options.images, folder / "images", options.num_images, options.num_evaluation)
        workload = run_files.image_workload(images, depths=[2, 2, 2, 2])
        what = f"half-width ResNet-18 at 32 px, {options.num_images:,} {made(options.images)} JPEGs, shifted, mirrored"
        yield Case(
            "images", what, 1.2, training(options, folder, workload, options.image_epochs, batch_size=128, lr=1e-3)
        )
    if "texts" in options.workloads:
        texts = samples.texts(options.text, options.vocab, folder / "texts", options.num_texts, options.num_evaluation)
        workload = run_files.text_workload(texts, 4, 256, options.max_length, cache=folder / "cache")
        what = f"BERT 4 x 256 from scratch, {made(options.text)} data, up to {options.max_length} tokens"
        yield Case("texts", what, 1.4, training(options, folder, workload, options.text_epochs, batch_size=32, lr=3e-4))


def training(
    options: argparse.Namespace, folder: Path, workload: dict[str, Any], epochs: int, batch_size: int, lr: float
) -> dict[str, Any]:
    """The task as a run file. What the Trainer has as defaults is spelled out; the rest are drivetrain's defaults."""
    return {
        "workload": workload,
        "precision": options.precision,
        "batch_size": batch_size,
        "loop": {"epochs": epochs, "max_grad_norm": 1.0},
        "optimizer": {"name": "adamw", "lr": lr},
        "schedule": {"name": "linear"},
        "evaluation": {"every_epochs": epochs},
        "loader": {"workers": options.workers},
        "output": str(folder / "run"),
    }


def measured(case: Case, folder: Path, options: argparse.Namespace) -> Iterator[Pair]:
    def pair(number: int) -> Pair:
        run = {**case.run, "seed": number}  # another start and order for each pair
        cache = folder / f"cache-{number}"  # a fresh one, so that tokenising is counted
        if case.name == "texts":
            run["workload"] = {**run["workload"], "data": {**run["workload"]["data"], "cache": str(cache)}}
        run_file = run_files.write_run(folder / "run.yaml", run)

        def ours() -> Measurement:
            return measure("ours.py", run_file, folder / "ours.json")

        def trainer() -> Measurement:
            return measure("hf_trainer.py", run_file, folder / "trainer.json")

        return in_turns(ours, trainer, number, options.foreign)

    return repeat(pair, options.pairs, options.attempts)


def accuracy(measurement: Measurement) -> float:
    return float(measurement.facts["metrics"]["accuracy"])


def loop_ratio(pair: Pair) -> float:
    """Of the training loops alone, without reading, decoding and tokenising ahead."""
    return float(pair.theirs.facts["loop_seconds"] / pair.ours.facts["loop_seconds"])


def pair_row(number: int, pair: Pair) -> list[str]:
    assert pair.ours.facts["samples"] == pair.theirs.facts["samples"], "both sides train on the same samples"
    return [
        str(number),
        f"{pair.ours.rate:.1f}",
        f"{pair.theirs.rate:.1f}",
        f"{pair.ratio:.2f}",
        f"{loop_ratio(pair):.2f}",
        f"{accuracy(pair.ours):.4f}",
        f"{accuracy(pair.theirs):.4f}",
        f"{pair.foreign_cores:.3f}" + (" (discarded)" if pair.disturbed else ""),
    ]


def summary_row(case: Case, pairs: Sequence[Pair]) -> list[str]:
    good = undisturbed(pairs)
    count = f"{len(good)} of {len(pairs)}"
    if not good:
        return [count, *["no undisturbed pair"] * 3, f"{case.target}", *accuracies(pairs)]
    low, median, high = quartiles([pair.ratio for pair in good])
    loops = statistics.median(loop_ratio(pair) for pair in good)
    reached = f"{case.target} {'reached' if median >= case.target else 'MISSED'}"
    return [count, f"{median:.2f}", f"{low:.2f} to {high:.2f}", f"{loops:.2f}", reached, *accuracies(pairs)]


def accuracies(pairs: Sequence[Pair]) -> list[str]:
    """Means over all pairs: being disturbed costs time, not accuracy."""
    ours, theirs = [accuracy(pair.ours) for pair in pairs], [accuracy(pair.theirs) for pair in pairs]
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(pairs) > 1 else float("nan")
    difference = f"{statistics.fmean(differences):+.4f} ± {error:.4f}"
    return [f"{statistics.fmean(ours):.4f}", f"{statistics.fmean(theirs):.4f}", difference]


def page(case: Case, pairs: Sequence[Pair], options: argparse.Namespace) -> str:
    head = ["pairs kept", "median ratio", "quartiles", "loops alone", "target"]
    head += ["accuracy, drivetrain", "accuracy, Trainer", "difference"]
    each = ["pair", "drivetrain, samples/s", "Trainer, samples/s", "ratio", "loops alone"]
    each += ["accuracy, drivetrain", "accuracy, Trainer", "foreign cores"]
    run = case.run
    return "\n".join(
        [
            f"# drivetrain against the Transformers Trainer: {case.name}",
            "",
            "Samples a second from reading the data to the last step, drivetrain over Trainer (above 1: drivetrain is "
            "quicker), for the same task and number of samples; each with its own defaults. Fresh processes in turns, "
            f"order swapped from pair to pair, a new seed for each pair; pairs with more than {options.foreign} cores "
            'of foreign work are discarded. "Difference" is the mean over the pairs and its standard error. '
            "`python bench/trainer.py` repeats it.",
            "",
            machine_line(),
            "",
            f"Work: {case.what}; {run['precision']}, batch {run['batch_size']}, epochs: {run['loop']['epochs']}, "
            f"AdamW, linear schedule; {options.num_evaluation:,} evaluation samples; {options.workers} loader "
            "processes.",
            "",
            markdown_table(head, [summary_row(case, pairs)]),
            "",
            markdown_table(each, [pair_row(number, pair) for number, pair in enumerate(pairs, 1)]),
            "",
        ]
    )


def made(given: Path | None) -> str:
    return "made" if given is None else "real"


if __name__ == "__main__":
    main()
