"""Measures what grpo and ppo learn: two-digit addition from a start by sft, and what a reward model prefers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from learning_pairs import DATA, MODEL, Table, made_pairs, started, words
from small_runs import answers, beaten, run_of, trained, wilson, with_error, written

HELD, TAUGHT = 1_000, 4_000  # sums that are never trained on; sums of the start
SFT_STEPS, GRPO_STEPS = 400, 300
PPO_STEPS = 150


def addition(folder: Path, options: argparse.Namespace) -> Table:
    draw = np.random.default_rng(options.seed)
    sums = [(int(n) // 90 + 10, int(n) % 90 + 10) for n in draw.permutation(8_100)]
    rows = [{"instruction": f"{a}+{b}=", "output": str(a + b)} for a, b in sums]
    held, taught, asked = rows[:HELD], rows[HELD : HELD + TAUGHT], rows[HELD:]
    common = {"length": 16, "template": "plain", "cache": str(folder / "cache"), "evaluation_fraction": 0}
    model = {"config": {**MODEL, "hidden_size": 128, "max_position_embeddings": 32}, "tokenizer": "characters"}
    data = {**common, "train": written(folder, "taught", taught)}
    start = trained(folder, "start", run_of("sft", model, data, 1e-3, 64, {"steps": SFT_STEPS}))
    learning = {"rewards": "exact_match", "answers": 8, "max_new_tokens": 5, "loss": "dapo", "clip_high": 0.28}
    data = {**common, "train": written(folder, "asked", asked)}
    path = {"path": str(start.checkpoint)}
    run = run_of("grpo", path, data, 2e-4, 32, {"steps": GRPO_STEPS}, reinforcement=learning)
    done = trained(folder, "grpo", run)
    table, right = [], {}
    for name, each in {"after sft": start, "after grpo": done}.items():
        right[name] = matches(each.checkpoint, held)
        share = float(np.mean(right[name]))
        low, high = wilson(share, HELD)
        drawn = with_error(matches(each.checkpoint, held, drawn=True))
        table.append([name, f"{share:.3f} ({low:.3f} to {high:.3f})", drawn, f"{each.seconds:.0f}"])
    gain = np.subtract(right["after grpo"], right["after sft"])
    text = (
        f"A model of 128 x 3 with a vocabulary of characters learns {TAUGHT:,} sums of two-digit numbers by sft "
        f"({SFT_STEPS:,} steps of 64), then answers the {8_100 - HELD:,} that are not held out and is rewarded for "
        f"exact matches (grpo, {GRPO_STEPS} steps of 32 prompts x 8 answers). Exact match of {HELD:,} held-out sums "
        "by the likeliest tokens, with its 95 % interval, and drawn at temperature 1. The gain, pair by pair: "
        f"{with_error(gain.tolist())}."
    )
    return text, ["model", "exact match", "drawn", "seconds"], table


def matches(checkpoint: Path, rows: list[dict[str, str]], drawn: bool = False) -> list[float]:
    found = answers(checkpoint, [row["instruction"] for row in rows], 5, drawn)
    return [float(text.strip() == row["output"]) for text, row in zip(found, rows, strict=True)]


def rewarded(folder: Path, options: argparse.Namespace) -> Table:
    pairs, held = made_pairs(np.random.default_rng(options.seed))
    start, asked = started(folder, pairs), [row["prompt"] for row in held]
    path, common = {"path": str(start.checkpoint)}, {**DATA, "cache": str(folder / "cache")}
    data = {**common, "train": written(folder, "pairs", pairs), "evaluation": written(folder, "held", held)}
    judge = trained(folder, "judge", run_of("reward", path, data, 1e-4, 32, {"epochs": 1}))
    prompts = [{"instruction": row["prompt"], "output": row["chosen"]} for row in pairs]
    data = {**common, "train": written(folder, "prompts", prompts), "evaluation_fraction": 0}
    learning: dict[str, Any] = {"rewards": {"model": str(judge.checkpoint)}, "max_new_tokens": 48, "beta": 0.02}
    learning |= {"updates": 2}
    done = trained(folder, "ppo", run_of("ppo", path, data, 1e-4, 64, {"steps": PPO_STEPS}, reinforcement=learning))
    before, after = (words(each.checkpoint, asked) for each in (start, done))
    low, high = wilson(judge.metrics["reward_accuracy"], len(held))
    row = [f"{judge.metrics['reward_accuracy']:.3f} ({low:.3f} to {high:.3f})", with_error(beaten(after, before))]
    row += [f"{np.mean(before):.1f} → {np.mean(after):.1f}", f"{judge.seconds:.0f}", f"{done.seconds:.0f}"]
    text = (
        "The pairs of `preference`: a reward model learns them (stage reward, one epoch), and rewards the answers "
        f"of the same start in stage ppo ({PPO_STEPS} updates of 32 answers). Accuracy: of {len(held)} held-out "
        "pairs, with its 95 % interval. Win rate: of as many new prompts answered at temperature 1 by the trained "
        "model and by its start, those whose answer is shorter (the rule that made the pairs, not the reward "
        "model), ties counted half."
    )
    return text, ["reward model's accuracy", "win rate", "words of an answer", "seconds, reward", "seconds, ppo"], [row]
