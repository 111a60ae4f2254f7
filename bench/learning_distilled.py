"""Measures what distillation teaches on given replies and on the model's own: numbers are put in order."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from learning_pairs import MODEL, Table
from small_runs import Trained, answers, run_of, trained, with_error, written

HELD, GIVEN, TAUGHT = 500, 2_000, 30_000  # rows that are asked in the end, to distil on, and the teacher's
DIGITS = 10  # of a prompt
TEACHER_STEPS, START_STEPS, STEPS = 500, 150, 200
SHARES = (0.0, 0.5, 1.0)  # of replies that the model writes itself
Row = dict[str, str]


def distilled(folder: Path, options: argparse.Namespace) -> Table:
    teacher, held = _teacher(folder)
    found: dict[float, list[list[float]]] = {share: [] for share in SHARES}
    seconds = dict.fromkeys(SHARES, 0.0)
    for seed in range(options.seed, options.seed + options.seeds):
        start, given = _start(folder, seed)
        for share in SHARES:
            block = {"teacher": str(teacher.checkpoint), "own_answers": share, "max_new_tokens": DIGITS + 2}
            run = run_of(
                "distill", {"path": str(start.checkpoint)}, given, 1e-3, 32, {"steps": STEPS}, distillation=block
            )
            done = trained(folder, f"distilled-{seed}-{share}", {**run, "seed": seed})
            found[share].append(_measures(done, held))
            seconds[share] += done.seconds
            print(seed, share, *(f"{each:.3f}" for each in found[share][-1]), flush=True)
    best = _measures(teacher, held)
    rows = [["(the teacher)", *(f"{each:.3f}" for each in best), "", ""]]
    for share, values in found.items():
        means = [with_error([each[number] for each in values]) for number in range(len(best))]
        gains = [after[1] - before[1] for after, before in zip(values, found[0.0], strict=True)]
        rows.append(
            [f"{share:.0%}", *means, with_error(gains) if share else "", f"{seconds[share] / options.seeds:.0f}"]
        )
    text = (
        f"A teacher of 128 x 3 learned to put {DIGITS} digits in order. A model of 48 x 2 that learned the same for "
        f"{START_STEPS} steps by sft is distilled from it for {STEPS} steps of 32 prompts, out of {GIVEN:,}, on the "
        f"data's replies or on a share of its own (`own_answers`). Of {HELD} prompts that neither was trained on: the "
        "share answered rightly by the likeliest tokens and drawn at temperature 1, and the share of a drawn answer's "
        f"digits that are right. Means of {options.seeds} seeds (data, start and draws) with their standard errors; "
        "the gain is seed by seed, over given replies."
    )
    head = ["own answers", "right, likeliest", "right, drawn", "digits right, drawn", "gain, drawn", "seconds"]
    return text, head, rows


def _teacher(folder: Path) -> tuple[Trained, list[Row]]:
    draw = np.random.default_rng(10**6)
    held, taught = _rows(draw, HELD), _rows(draw, TAUGHT)
    model = {"config": {**MODEL, "hidden_size": 128, "max_position_embeddings": 32}, "tokenizer": "characters"}
    data = {**_common(folder), "train": written(folder, "taught", taught)}
    return trained(folder, "teacher", run_of("sft", model, data, 1e-3, 64, {"steps": TEACHER_STEPS})), held


def _start(folder: Path, seed: int) -> tuple[Trained, dict[str, Any]]:
    """Returns the model that is distilled, and the data of its distillation."""
    config = {
        **MODEL,
        "hidden_size": 48,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "max_position_embeddings": 32,
    }
    model = {"config": config, "tokenizer": "characters"}
    data = {**_common(folder), "train": written(folder, f"given-{seed}", _rows(np.random.default_rng(seed), GIVEN))}
    run = run_of("sft", model, data, 1e-3, 64, {"steps": START_STEPS})
    return trained(folder, f"start-{seed}", {**run, "seed": seed}), data


def _common(folder: Path) -> dict[str, Any]:
    return {"length": 32, "template": "plain", "cache": str(folder / "cache"), "evaluation_fraction": 0}


def _rows(draw: np.random.Generator, count: int) -> list[Row]:
    numbers = draw.integers(0, 10, (count, DIGITS))
    return [{"instruction": f"{_text(row)}=", "output": _text(np.sort(row))} for row in numbers]


def _text(row: np.ndarray) -> str:
    return "".join(map(str, row.tolist()))


def _measures(done: Trained, held: list[Row]) -> list[float]:
    """Returns the share of right answers by the likeliest tokens, and drawn; and of right digits of drawn ones."""
    asked, wanted = [row["instruction"] for row in held], [row["output"] for row in held]
    likeliest, drawn = (answers(done.checkpoint, asked, DIGITS + 2, drawn=how) for how in (False, True))
    right = [
        float(np.mean([each.strip() == one for each, one in zip(some, wanted, strict=True)]))
        for some in (likeliest, drawn)
    ]
    digits = [
        sum(a == b for a, b in zip(each.strip(), one, strict=False)) / DIGITS
        for each, one in zip(drawn, wanted, strict=True)
    ]
    return [*right, float(np.mean(digits))]
