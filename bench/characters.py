"""A GPT of characters in nanoGPT's setting for a CPU: drivetrain against the same training written by hand.

    python bench/characters.py --text tinyshakespeare.txt

4 layers 128 wide, windows of 64 characters, 12 a batch, 2,000 steps: recipes/shakespeare-char.yaml. Both sides see
the same windows in the same order. Two processes in turns of ten steps (lockstep.py); evaluation lies outside of them.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import run_files
import yaml
from interleaved import BENCH, Pair, quartiles, repeat, undisturbed
from lockstep import Child, lockstep
from tables import machine_line, markdown_table, write
from turns import TRACKER

RECIPE = BENCH.parent / "recipes" / "shakespeare-char.yaml"
STEPS_A_TURN = 10
MOST_NATS, NEAR, LEAST_RATIO = 1.92, 0.01, 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description="drivetrain against nanoGPT's training of characters by hand")
    parser.add_argument("--text", type=Path, required=True, help="char-rnn's tinyshakespeare.txt")
    parser.add_argument("--pairs", type=int, default=3, help="undisturbed pairs")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=BENCH / "results" / "characters.md")
    options = parser.parse_args()
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory(prefix="characters-") as folder:
        for pair in repeat(lambda number: measured(options, Path(folder), number), options.pairs):
            pairs.append(pair)
            print("  ".join(pair_row(len(pairs), pair)), flush=True)
    write(options.output, page(pairs, options.steps))


def measured(options: argparse.Namespace, folder: Path, number: int) -> Pair:
    run: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
    run["workload"]["data"] |= {"train": str(options.text.resolve()), "cache": str(folder / "cache")}
    run["loop"]["steps"] = options.steps
    run["evaluation"]["every_steps"] = options.steps
    run |= {"seed": number, "tracking": {"trackers": ["progress", TRACKER]}, "output": str(folder / "run")}
    run_file = run_files.write_run(folder / "run.json", run)
    ours = Child("ours.py", run_file, folder / "ours.json")
    plain = Child("plain_characters.py", run_file, folder / "plain.json")
    turns = options.steps // STEPS_A_TURN - 1
    return lockstep(ours, plain, turns, STEPS_A_TURN * run["batch_size"], swap=number % 2 == 1)


def nats(pair: Pair) -> tuple[float, float]:
    """Over the whole last tenth of the text."""
    return float(pair.ours.facts["metrics"]["loss"]), float(pair.theirs.facts["evaluation"])


def processor_ratio(pair: Pair) -> float:
    return float(pair.theirs.facts["processor_seconds"] / pair.ours.facts["processor_seconds"])


def pair_row(number: int, pair: Pair) -> list[str]:
    ours, plain = nats(pair)
    quiet = f"{pair.ours.facts['quiet_turns']} of {pair.ours.facts['turns']}" + (
        " (discarded)" if pair.disturbed else ""
    )
    rates = [f"{pair.ours.rate:,.0f}", f"{pair.theirs.rate:,.0f}", f"{pair.ratio:.3f}", f"{processor_ratio(pair):.3f}"]
    return [str(number - 1), f"{ours:.4f}", f"{plain:.4f}", f"{ours - plain:+.5f}", *rates, quiet]


def page(pairs: list[Pair], steps: int) -> str:
    head = ["seed", "nats, drivetrain", "nats, by hand", "difference"]
    head += ["windows/s, drivetrain", "by hand", "ratio", "processor time, ratio", "quiet turns"]
    good = undisturbed(pairs)
    lines = ["No undisturbed pair."]
    if good:
        _, median, _ = quartiles([pair.ratio for pair in good])
        worst, apart = max(nats(pair)[0] for pair in pairs), max(abs(a - b) for a, b in map(nats, pairs))
        checks = [
            (f"largest loss {worst:.4f}, at most {MOST_NATS}", worst <= MOST_NATS),
            (f"largest difference {apart:.5f}, at most {NEAR}", apart <= NEAR),
            (f"median ratio of speed {median:.3f}, at least {LEAST_RATIO}", median >= LEAST_RATIO),
        ]
        lines = [f"- {what}: {'reached' if yes else 'MISSED'}" for what, yes in checks]
    return "\n".join(
        [
            "# Characters of Shakespeare: drivetrain and the same training by hand",
            "",
            f"`recipes/shakespeare-char.yaml`, {steps:,} steps, and the loss in nats a character over the "
            "whole last tenth of the text. Ratios above 1: drivetrain is quicker. "
            "`python bench/characters.py` repeats it.",
            "",
            machine_line(),
            "",
            *lines,
            "",
            markdown_table(head, [pair_row(number, pair) for number, pair in enumerate(pairs, 1)]),
            "",
        ]
    )


if __name__ == "__main__":
    main()
