"""Each stage learns what it should: small models, held-out figures with their errors, minutes on two cores each.

    python bench/learning.py preference      # dpo: 5,000 made pairs; labels by rule, and shuffled
    python bench/learning.py addition        # sft, then grpo: two-digit addition
    python bench/learning.py rewarded        # sft, reward, then ppo by that reward model
    python bench/learning.py distilled       # distillation on given replies and on the model's own, over seeds
    python bench/learning.py pairs --data dpo_en_demo.json --texts alpaca_en_demo.json   # reward, dpo: real pairs;
                                             # labels as they are, and shuffled

Each command replaces its own part of bench/results/learning.md. Answers are drawn by Transformers alone, from the
checkpoints that a run leaves.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import learning_distilled
import learning_pairs
import learning_rewards
from interleaved import BENCH
from tables import machine_line, markdown_table, with_part

RESULTS = BENCH / "results" / "learning.md"
TITLE = "# Each stage learns what it should\n\nMade by `python bench/learning.py`, a command for each part.\n"
COMMANDS: dict[str, Callable[[Path, argparse.Namespace], tuple[str, Sequence[str], Sequence[Sequence[str]]]]] = {
    "preference": learning_pairs.preference,
    "pairs": learning_pairs.real_pairs,
    "addition": learning_rewards.addition,
    "rewarded": learning_rewards.rewarded,
    "distilled": learning_distilled.distilled,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="what small models learn from each stage")
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--data", type=Path, help="pairs: dpo_en_demo.json")
    parser.add_argument("--texts", type=Path, help="pairs: alpaca_en_demo.json, which the model learns first")
    parser.add_argument(
        "--stages", nargs="+", default=["reward", "dpo"], choices=["reward", "dpo"], help="pairs: stages"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3, help="distilled: how many, from --seed on")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="learning-") as folder:
        text, titles, rows = COMMANDS[options.command](Path(folder), options)
    minutes = f"{(time.monotonic() - began) / 60:.1f} minutes. {machine_line()}"
    part = f"## {options.command}\n\n{text}\n\n{markdown_table(titles, rows)}\n\n{minutes}\n"
    page = options.output.read_text() if options.output.exists() else TITLE
    options.output.write_text(with_part(page, options.command, part))
    print(part)


if __name__ == "__main__":
    main()
