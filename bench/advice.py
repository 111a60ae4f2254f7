"""How often the advice of `drivetrain compare` claims a winner: of rows that are equal, and of rows that are not.

    python bench/advice.py              # made comparisons with the noise of real runs: a few minutes
    python bench/advice.py --measure    # renews that noise first: trains the digits recipe 70 times

A made comparison draws its runs from real ones. Rates: the deviations of like runs from their mean, on a machine that
did nothing else (the pairs of comparing.md) and on one that was shared, whose runs count as disturbed. Answers: those
of two precisions on the evaluation samples of each seed, dealt to the rows at random, seed by seed, so that no row is
better than another. For a true difference one row is made better by a number of spreads: the standard deviation of the
rates of like runs, or of the accuracy over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.compare.outcome import Outcome
from drivetrain.compare.result_rows import Comparison, Result, Row
from drivetrain.compare.scores import Scores
from drivetrain.compare.verdict import judged
from drivetrain.training.report import RunReport

RESULTS = Path(__file__).resolve().parent / "results"
POOL = RESULTS / "advice_noise.json"
PRECISIONS = ("fp32", "bf16-mixed")
SEEDS = range(100, 135)
NUM_SEEDS, SPREADS = (1, 3, 5), 3.0


@dataclass(frozen=True)
class Pool:
    """Noise of real runs. quiet, shared: deviations of the logarithm of the rate. answers: of each seed, (precisions,
    samples) of 0 and 1. machine: where the runs of `shared` and `answers` were made."""

    quiet: np.ndarray
    shared: np.ndarray
    answers: list[np.ndarray]
    machine: str

    @property
    def spread_of_accuracy(self) -> float:
        """The standard deviation of the accuracy over the seeds, of one precision."""
        return float(np.std([each.mean(axis=1) for each in self.answers], axis=0, ddof=1).mean())


class MadeResult(Result):
    """A run without a folder."""

    made_scores: Scores

    def scores(self, metric: str) -> Scores | None:
        return self.made_scores if metric == "accuracy" else None


def main() -> None:
    parser = argparse.ArgumentParser(description="how often the advice claims a winner")
    parser.add_argument("--measure", action="store_true", help="renew the noise of real runs")
    parser.add_argument("--comparisons", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=RESULTS / "advice.md")
    options = parser.parse_args()
    if options.measure:
        measure()
    from tables import write  # beside this file, where a script finds it

    write(options.output, page(read_pool(), options.comparisons))


# --- made comparisons ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What is made: `quicker`, `better`: spreads by which the last row's rate or accuracy is above the others'. By
    engine, rows are equal in all but that, so that accuracy does not tell them apart."""

    rows: int
    seeds: int
    shared: bool = False
    quicker: float = 0.0
    better: float = 0.0
    by_engine: bool = False


def claims(pool: Pool, setting: Setting, comparisons: int, dice: np.random.Generator) -> tuple[float, float]:
    """Returns the shares of comparisons in which a winner is claimed, and in which it is the last row."""
    winners = [judged(made(pool, setting, dice)).winner for _ in range(comparisons)]
    claimed = [winner.label for winner in winners if winner is not None]
    return len(claimed) / comparisons, claimed.count(f"row {setting.rows}") / comparisons


def made(pool: Pool, setting: Setting, dice: np.random.Generator) -> Comparison:
    """Returns a comparison of runs that were drawn from the pool."""
    rates = pool.shared if setting.shared else pool.quiet
    logarithms = dice.choice(rates, (setting.rows, setting.seeds))
    logarithms[-1] += setting.quicker * rates.std(ddof=1)
    seeds = dice.choice(len(pool.answers), setting.seeds, replace=False)
    answers = [dealt(pool.answers[seed], setting.rows, dice) for seed in seeds]
    if setting.better:
        for each in answers:
            worsen(each[:-1], setting.better * pool.spread_of_accuracy, dice)
    rows = tuple(row(number, setting, logarithms[number], answers) for number in range(setting.rows))
    return Comparison("made", "train", ("setting",), rows)


def dealt(answers: np.ndarray, rows: int, dice: np.random.Generator) -> np.ndarray:
    """Returns the answers of equal rows at one seed, (rows, samples): those of the real runs in any order. More rows
    than these share them, which matters only where accuracy tells them apart."""
    order = dice.permutation(len(answers))
    return answers[np.resize(order, rows)]


def worsen(answers: np.ndarray, by: float, dice: np.random.Generator) -> None:
    """Makes a share `by` of all samples wrong that were right."""
    for each in answers:
        right = np.flatnonzero(each)
        each[dice.choice(right, min(len(right), round(by * len(each))), replace=False)] = 0


def row(number: int, setting: Setting, logarithms: np.ndarray, answers: Sequence[np.ndarray]) -> Row:
    label, results = f"row {number + 1}", []
    for seed, (logarithm, right) in enumerate(zip(logarithms, answers, strict=True)):
        outcome = Outcome(key="", status="completed", foreign_share=0.5 if setting.shared else 0.0)
        result = MadeResult(outcome, Path(), made_report(1000 * math.exp(logarithm), right[number]))
        differs = {"engine": {"name": label}} if setting.by_engine else {"precision": label}
        ones = np.ones(right.shape[1])
        result.__dict__ |= {
            "config": {"seed": seed, "batch_size": 64, **differs},
            "events": [],
            "made_scores": Scores(right[number].astype(float), ones, f"samples of seed {seed}"),
        }
        results.append(result)
    return Row(label, (label,), tuple(results))


def made_report(rate: float, right: np.ndarray) -> RunReport:
    accuracy = float(right.mean())
    facts: dict[str, Any] = {
        "name": "made",
        "status": "completed",
        "precision": "fp32",
        "emulated": False,
        "engine": "single",
        "device": "",
        "engaged": {},
        "steps": 1,
        "skipped_steps": 0,
        "epochs": 1.0,
        "samples": 1,
        "metrics": {"accuracy": accuracy},
        "best": {"step": 1, "metric": "accuracy", "value": accuracy},
        "seconds": 1.0,
        "seconds_by_part": {},
        "samples_per_second": rate,
        "peak_memory": {},
        "utilisation": {},
        "flops_per_sample": None,
        "flops_per_second": None,
        "matmul_flops_per_second": None,
        "data": {"evaluation_samples": len(right), "classes": 10},
        "checkpoint": None,
        "best_checkpoint": None,
        "versions": {},
    }
    return RunReport(**facts)


# --- the noise of real runs ------------------------------------------------------------------------------------------


def read_pool() -> Pool:
    kept = json.loads(POOL.read_text())
    answers = [np.stack([unpacked(bits, each["samples"]) for bits in each["right"]]) for each in kept["answers"]]
    return Pool(np.array(quiet()), np.array(kept["rates"]), answers, kept["machine"])


def unpacked(bits: str, samples: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8))[:samples]


def quiet() -> list[float]:
    """Returns the deviations of the rates of comparing.md, whose two columns are of like runs."""
    lines = [line.split("|") for line in (RESULTS / "comparing.md").read_text().splitlines() if line.startswith("| ")]
    numbers = [[float(cell) for cell in line[2:4]] for line in lines if line[1].strip().isdigit()]
    return [each for column in zip(*numbers, strict=True) for each in deviations(column)]


def deviations(rates: Sequence[float]) -> Iterator[float]:
    """Yields the deviations of the logarithms, widened so that their variance is that of single runs."""
    logarithms = [math.log(rate) for rate in rates]
    mean, widened = statistics.fmean(logarithms), math.sqrt(len(rates) / (len(rates) - 1))
    yield from ((each - mean) * widened for each in logarithms)


def measure() -> None:
    """Trains the digits recipe at each seed and precision, one run after another, and keeps rates and answers."""
    import tempfile

    from tables import machine_line

    import drivetrain

    rates: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    answers = []
    with tempfile.TemporaryDirectory(prefix="advice-") as folder:
        for seed in SEEDS:
            right = []
            for precision in PRECISIONS:
                recipe = RESULTS.parents[1] / "recipes" / "digits.yaml"
                report = drivetrain.train(recipe, seed=seed, precision=precision, output=f"{folder}/{seed}-{precision}")
                rates[precision].append(report.samples_per_second or math.nan)
                with np.load(report.folder / "scores.npz") as scores:
                    right.append(scores["right"])
            answers.append({"samples": len(right[0]), "right": [np.packbits(each).tobytes().hex() for each in right]})
            print(seed, [f"{each.mean():.4f}" for each in right], file=sys.stderr, flush=True)
    kept = [each for of_one in rates.values() for each in deviations(of_one)]
    POOL.write_text(json.dumps({"machine": machine_line(), "rates": kept, "answers": answers}, indent=1) + "\n")


# --- the page --------------------------------------------------------------------------------------------------------


TABLES: tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...] = (
    ("Equal rows of other precisions, quiet machine", (2,), {}),
    ("Equal rows of other precisions, shared machine", (2,), {"shared": True}),
    ("Equal rows of other engines, quiet machine", (2, 4, 8), {"by_engine": True}),
    ("Equal rows of other engines, shared machine", (2, 4, 8), {"by_engine": True, "shared": True}),
    ("Of engines one is quicker, quiet machine", (2, 4, 8), {"by_engine": True, "quicker": SPREADS}),
    ("Of engines one is quicker, shared machine", (2, 4, 8), {"by_engine": True, "quicker": SPREADS, "shared": True}),
    ("Of precisions one is quicker, quiet machine", (2,), {"quicker": SPREADS}),
    ("Of precisions one is more accurate", (2,), {"better": SPREADS}),
)


def page(pool: Pool, comparisons: int) -> str:
    from tables import markdown_table

    head = ["", *(f"{seeds} seed{'s' * (seeds > 1)}" for seeds in NUM_SEEDS)]
    texts = []
    for title, sizes, changes in TABLES:
        differ = "quicker" in changes or "better" in changes
        lines = [[f"{rows} rows", *shares(pool, rows, comparisons, differ, **changes)] for rows in sizes]
        what = f"by {SPREADS:g} spreads: the right winner found" if differ else "a winner claimed"
        texts += [f"## {title}: {what}", "", markdown_table(head, lines), ""]
    spreads = (
        f"{pool.quiet.std(ddof=1):.1%} on the quiet machine, {pool.shared.std(ddof=1):.1%} on the shared one",
        f"{pool.spread_of_accuracy:.4f}",
    )
    told = [
        f"Shares of {comparisons:,} made comparisons a cell, by `python bench/advice.py`, whose first lines say how",
        f"they are made. A spread is the standard deviation of the rates of like runs ({spreads[0]}),",
        f"or of the accuracy over seeds ({spreads[1]}). Runs on the shared machine count as disturbed: one of them",
        "alone says nothing about speed.",
    ]
    machines = f"Rates of a quiet machine: [comparing.md](comparing.md). The others, and the answers: {pool.machine}"
    lines = ["# How often the advice claims a winner", "", " ".join(told), "", machines, "", *texts, one_seed(pool), ""]
    return "\n".join(lines)


def shares(pool: Pool, rows: int, comparisons: int, differ: bool, **changes: Any) -> Iterator[str]:
    """Yields the shares for each number of seeds: of the right winner where rows differ, else of any."""
    for seeds in NUM_SEEDS:
        dice = np.random.default_rng(rows * 100 + seeds)
        claimed, right = claims(pool, Setting(rows, seeds, **changes), comparisons, dice)
        yield f"{right if differ else claimed:.1%}"


def one_seed(pool: Pool) -> str:
    """Returns what one seed leaves out: the variance of a difference over seeds, over that which its samples show."""
    over_seeds, over_samples = [], []
    for first in range(len(PRECISIONS)):
        for second in range(first):
            pairs = [each[first].astype(float) - each[second] for each in pool.answers]
            over_seeds.append(statistics.variance(float(pair.mean()) for pair in pairs))
            over_samples.append(statistics.fmean(float(pair.var(ddof=1)) / len(pair) for pair in pairs))
    ratio = sum(over_seeds) / sum(over_samples)
    return (
        "The difference of two precisions' accuracy at one seed varies over the seeds, samples included, with "
        f"{ratio:.2f} times the variance that its samples alone show."
    )


if __name__ == "__main__":
    main()
