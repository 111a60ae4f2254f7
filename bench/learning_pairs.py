"""Measures what dpo and reward learn from pairs: a made preference, with true and shuffled labels, and real pairs."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from small_runs import Trained, answers, beaten, run_of, trained, wilson, with_error, written

PROMPTS, PAIRS = 5_400, 5_000
WORDS = [first + last for first in ("ba", "do", "ki", "lu", "me", "po") for last in ("n", "r", "s", "t")]
MODEL = {
    "model_type": "llama", "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
FOLDS, EPOCHS, LENGTH = 5, 1, 384
Pair = dict[str, str]
Table = tuple[str, list[str], list[list[str]]]


# --- a made preference: the shorter answer is better -----------------------------------------------------------------


def preference(folder: Path, options: argparse.Namespace) -> Table:
    draw = np.random.default_rng(options.seed)
    pairs, held = made_pairs(draw)
    start, asked = started(folder, pairs), [row["prompt"] for row in held]
    before = words(start.checkpoint, asked)
    rows = []
    for name, change in {"rule": lambda rows: rows, "shuffled": lambda rows: half_swapped(rows, draw)}.items():
        data = {**DATA, "train": written(folder, name, change(pairs)), "cache": str(folder / "cache")}
        data["evaluation"] = written(folder, f"{name}-held", change(held))
        # without sft the chosen answers lose likelihood with the rejected ones: here they are random. Not nll, which
        # counts each answer once: the ends of short ones weigh more in it, and answers shorten whatever the labels are
        block = {"loss": {"sigmoid": 1.0, "sft": 1.0}}
        run = run_of("dpo", {"path": str(start.checkpoint)}, data, 1e-4, 32, {"epochs": 1}, preference=block)
        done = trained(folder, f"run-{name}", run)
        after = words(done.checkpoint, asked)
        low, high = wilson(done.metrics["reward_accuracy"], len(held))
        cells = [
            f"{done.metrics['reward_accuracy']:.3f} ({low:.3f} to {high:.3f})",
            f"{done.metrics['reward_margin']:.2f}",
        ]
        cells += [
            with_error(beaten(after, before)),
            f"{np.mean(before):.1f} → {np.mean(after):.1f}",
            f"{done.seconds:.0f}",
        ]
        rows.append([name, *cells])
        print("  ".join(rows[-1]), flush=True)
    text = (
        f"{PAIRS:,} made pairs whose shorter answer is preferred; the model answers shortly or at length as often "
        f"before. Accuracy: of {len(held)} held-out pairs, whose labels were made as those of the training, the "
        "share whose chosen answer has the higher reward, with its 95 % interval. Win rate: of as many new prompts "
        "answered at temperature 1 by the trained model and by the one it started from, those whose answer is "
        "shorter, ties counted half, with its standard error. Shuffled: one half of the labels, drawn at random, "
        "are swapped."
    )
    return text, ["labels", "accuracy", "margin", "win rate", "words of an answer", "seconds"], rows


DATA: dict[str, Any] = {"length": 64, "template": "chatml"}


def made_pairs(draw: np.random.Generator) -> tuple[list[Pair], list[Pair]]:
    """Returns the pairs to learn from, and those held out."""
    rows = [made_pair(number, draw) for number in range(PROMPTS)]
    return rows[:PAIRS], rows[PAIRS:]


def made_pair(number: int, draw: np.random.Generator) -> Pair:
    """A prompt and two answers of its words: two to four of them, or seven to twelve."""
    short, long = (" ".join(draw.choice(WORDS, int(draw.integers(*most)))) for most in ((2, 5), (7, 13)))
    return {"prompt": f"say {number} {' '.join(draw.choice(WORDS, 2))}", "chosen": short, "rejected": long}


def half_swapped(rows: list[Pair], draw: np.random.Generator) -> list[Pair]:
    """Returns the rows with the labels of one half, drawn at random, swapped."""
    swapped = set(draw.permutation(len(rows))[: len(rows) // 2].tolist())
    return [swapped_row(row) if number in swapped else row for number, row in enumerate(rows)]


def swapped_row(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "chosen": row["rejected"], "rejected": row["chosen"]}


def started(folder: Path, pairs: list[Pair]) -> Trained:
    """Returns a model that has learned both answers of each pair (sft)."""
    taught = [{"instruction": row["prompt"], "output": row[side]} for row in pairs for side in ("chosen", "rejected")]
    data = {**DATA, "train": written(folder, "taught", taught), "cache": str(folder / "cache")}
    model = {"config": MODEL, "tokenizer": "bpe", "vocabulary_size": 400}
    return trained(
        folder, "start", run_of("sft", model, {**data, "evaluation_fraction": 0.02}, 3e-3, 32, {"epochs": 2})
    )


def words(checkpoint: Path, asked: list[str]) -> list[float]:
    return [float(len(text.split())) for text in answers(checkpoint, asked, 48, drawn=True)]


# --- real pairs ------------------------------------------------------------------------------------------------------


def real_pairs(folder: Path, options: argparse.Namespace) -> Table:
    if options.data is None or options.texts is None:
        raise SystemExit("pairs needs --data dpo_en_demo.json and --texts alpaca_en_demo.json")
    given = json.loads(options.data.read_text(encoding="utf-8"))
    sides = [(each["chosen"]["value"], each["rejected"]["value"]) for each in given]
    rows = [each for each, (chosen, rejected) in zip(given, sides, strict=True) if chosen != rejected]
    common = {"length": LENGTH, "template": "chatml", "cache": str(folder / "cache")}
    start = taught_on_texts(folder, options.texts, common)
    draw = np.random.default_rng(options.seed)
    order = draw.permutation(len(rows))
    # each label by a coin of its own: of exactly one half, those held out would be the more where those learned are few
    tossed = [swapped_row(row) if swap else row for row, swap in zip(rows, draw.random(len(rows)) < 0.5, strict=True)]
    labels = {"": rows, ", shuffled labels": tossed}
    found: dict[str, list[tuple[float, int]]] = {f"{stage}{way}": [] for stage in options.stages for way in labels}
    seconds = dict.fromkeys(found, 0.0)
    for number, held in enumerate(np.array_split(order, FOLDS)):
        for name, folds in found.items():
            stage, shuffled, _ = name.partition(",")
            own = labels[name.removeprefix(stage)]
            parts = {"train": [own[i] for i in order if i not in set(held)], "evaluation": [own[i] for i in held]}
            source = {"formatting": "sharegpt", "columns": {"chosen": "chosen", "rejected": "rejected"}}
            place = f"{number}{'-shuffled' if shuffled else ''}"
            data = {key: [{**source, "path": written(folder, f"{key}-{place}", part)}] for key, part in parts.items()}
            lr, model = {"reward": 1e-4, "dpo": 5e-5}[stage], {"path": str(start.checkpoint)}
            run = run_of(stage, model, common | data, lr, 8, {"epochs": EPOCHS})
            done = trained(folder, f"{stage}-{place}", run)
            folds.append((done.metrics["reward_accuracy"], len(held)))
            seconds[name] += done.seconds
            print(name, number, f"{done.metrics['reward_accuracy']:.3f}", flush=True)
    table = []
    for stage, folds in found.items():
        count = sum(size for _, size in folds)
        right = sum(accuracy * size for accuracy, size in folds) / count
        low, high = wilson(right, count)
        each = f"{min(a for a, _ in folds):.2f} to {max(a for a, _ in folds):.2f}"
        table.append([stage, str(count), f"{right:.3f} ({low:.3f} to {high:.3f})", each, f"{seconds[stage]:.0f}"])
    shorter = statistics.fmean(float(len(c) < len(r)) + 0.5 * (len(c) == len(r)) for c, r in sides)
    low, high = wilson(shorter, len(rows))
    table.append(["(the shorter one)", str(len(rows)), f"{shorter:.3f} ({low:.3f} to {high:.3f})", "", ""])
    text = (
        f"{len(rows)} pairs of dpo_en_demo, of at most {LENGTH} tokens; a model of {WIDTH} x {BLOCKS} that learned "
        f"alpaca_en_demo for three epochs from random weights, then {EPOCHS} epoch of pairs. Each pair is held out "
        f"in one of {FOLDS} folds; accuracy is of all held-out pairs, with its 95 % interval, and of each fold. "
        "Shuffled: each label is swapped or not by a coin, those of held-out pairs too. The "
        "last row is the rule that the shorter answer is better, by characters."
    )
    return text, ["stage", "held-out pairs", "accuracy", "of folds", "seconds"], table


WIDTH, BLOCKS = 192, 4


def taught_on_texts(folder: Path, texts: Path, common: dict[str, Any]) -> Trained:
    config = {**MODEL, "hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": BLOCKS}
    model = {"config": {**config, "max_position_embeddings": LENGTH}, "tokenizer": "bpe", "vocabulary_size": 4000}
    data = {**common, "train": [{"path": str(texts.resolve()), "formatting": "alpaca"}], "evaluation_fraction": 0.05}
    return trained(folder, "start", run_of("sft", model, data, 2e-3, 16, {"epochs": 3}))
