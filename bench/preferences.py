"""A made preference, learned: a small model that answers shortly or at length as often learns from 5,000 pairs to
answer shortly, and from the same pairs with shuffled labels nothing.

    python bench/preferences.py

First the model learns both kinds of answers (sft), then which of two is preferred (dpo). Both models answer 400 prompts
that neither saw, drawn at temperature 1. The shorter answer wins: the win rate counts ties half.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interleaved import BENCH
from tables import machine_line, markdown_table, write
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS, PAIRS, ASKED = 5_400, 5_000, 400
WORDS = [first + last for first in ("ba", "do", "ki", "lu", "me", "po") for last in ("n", "r", "s", "t")]
MODEL = {
    "model_type": "llama", "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="a made preference of 5,000 pairs")
    parser.add_argument("--output", type=Path, default=BENCH / "results" / "preferences.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="preferences-") as folder:
        rows = measured(Path(folder))
    titles = ["labels", "accuracy", "standard error", "margin", "win rate", "standard error", "words", "seconds"]
    text = (
        "# A made preference of 5,000 pairs: the shorter answer is better\n\n"
        f"`python bench/preferences.py` repeats it. {machine_line()}\n\n"
        f"Accuracy: of {ASKED} held-out pairs, whose labels were made as those of the training, the share whose chosen "
        "answer has the higher reward; margin: by how much, on average. "
        f"Win rate: of {ASKED} new prompts answered at temperature 1 by the trained model and by the one it started "
        "from, those whose answer is shorter, ties counted half.\n\n"
    )
    write(options.output, text + markdown_table(titles, rows))


def measured(folder: Path) -> list[list[str]]:
    draw = np.random.default_rng(0)
    rows = [pair(number, draw) for number in range(PROMPTS)]
    pairs, asked = rows[:PAIRS], [row["prompt"] for row in rows[PAIRS:]]
    taught = [{"instruction": row["prompt"], "output": row[side]} for row in pairs for side in ("chosen", "rejected")]
    files = {"sft": taught, "rule": pairs, "rule-held": rows[PAIRS:]}
    files |= {"shuffled": half_swapped(pairs, draw), "shuffled-held": half_swapped(rows[PAIRS:], draw)}
    for name, content in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    start = train(folder, "sft", {"config": MODEL, "tokenizer": "bpe", "vocabulary_size": 400}, lr=3e-3, epochs=2)[0]
    before = answers(start, asked)
    found = []
    for name in ("rule", "shuffled"):
        checkpoint, metrics, seconds = train(folder, name, {"path": str(start)}, lr=1e-4, epochs=1)
        accuracy, after = metrics["reward_accuracy"], answers(checkpoint, asked)
        wins = [1.0 if a < b else 0.5 if a == b else 0.0 for a, b in zip(after, before, strict=True)]
        rate, words = sum(wins) / ASKED, f"{np.mean(before):.1f} → {np.mean(after):.1f}"
        spread = math.sqrt(max(accuracy * (1 - accuracy), 1 / ASKED) / ASKED)
        cells = [f"{accuracy:.3f}", f"{spread:.3f}", f"{metrics['reward_margin']:.2f}"]
        cells += [f"{rate:.3f}", f"{np.std(wins) / math.sqrt(ASKED):.3f}", words, f"{seconds:.0f}"]
        found.append([name, *cells])
        print("  ".join(found[-1]), flush=True)
    return found


def pair(number: int, draw: np.random.Generator) -> dict[str, str]:
    """A prompt and two answers of its words: two to four of them, or seven to twelve."""
    short, long = (" ".join(draw.choice(WORDS, int(draw.integers(*most)))) for most in ((2, 5), (7, 13)))
    return {"prompt": f"say {number} {' '.join(draw.choice(WORDS, 2))}", "chosen": short, "rejected": long}


def half_swapped(rows: list[dict[str, str]], draw: np.random.Generator) -> list[dict[str, str]]:
    """Returns the rows with the labels of one half, drawn at random, swapped."""
    swapped = set(draw.permutation(len(rows))[: len(rows) // 2].tolist())
    return [
        {**row, "chosen": row["rejected"], "rejected": row["chosen"]} if number in swapped else row
        for number, row in enumerate(rows)
    ]


def train(
    folder: Path, name: str, model: dict[str, Any], lr: float, epochs: int
) -> tuple[Path, dict[str, float], float]:
    """Returns the checkpoint's folder, the metrics of its evaluation, and the seconds of the training."""
    stage = "sft" if name == "sft" else "dpo"
    data = {"train": str(folder / f"{name}.jsonl"), "length": 64, "template": "chatml", "cache": str(folder / "cache")}
    data |= {"evaluation_fraction": 0.02} if stage == "sft" else {"evaluation": str(folder / f"{name}-held.jsonl")}
    workload = {"type": "language_model", "stage": stage, "model": model, "data": data}
    if stage == "dpo":  # without nll the chosen answers lose likelihood with the rejected ones: here they are random
        workload["preference"] = {"loss": {"sigmoid": 1.0, "nll": 1.0}}
    run = {"workload": workload, "batch_size": 32, "loop": {"epochs": epochs}, "optimizer": {"name": "adamw", "lr": lr}}
    run["schedule"] = {"name": "cosine"}
    (folder / f"{name}.json").write_text(json.dumps({**run, "output": str(folder / name)}))
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "drivetrain", "train", str(folder / f"{name}.json"), "--quiet"], check=True)
    seconds = time.monotonic() - began
    report = json.loads((folder / name / "report.json").read_text())
    [checkpoint] = sorted((folder / name / "checkpoints").glob("step-*"))[-1:]
    return checkpoint, report["metrics"], seconds


@torch.no_grad()
def answers(checkpoint: Path, asked: list[str]) -> list[int]:
    """Returns the words of each answer, through Transformers alone."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    talks = [[{"role": "user", "content": prompt}] for prompt in asked]
    tokenizer.padding_side = "left"
    given = tokenizer.apply_chat_template(
        talks, add_generation_prompt=True, return_tensors="pt", padding=True, return_dict=True
    )
    torch.manual_seed(0)
    made = model.generate(**given, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=48)
    texts = tokenizer.batch_decode(made[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
    return [len(text.split()) for text in texts]


if __name__ == "__main__":
    main()
