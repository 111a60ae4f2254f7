"""Measures what distillation teaches on given replies and on the model's own: digits are put in order."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learning_pairs import MODEL, Table
from small_runs import answers, run_of, trained, with_error, written
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

HELD, GIVEN, TAUGHT = 500, 2_000, 20_000  # rows that are asked in the end, to distil on, and the teacher's
DIGITS = 8  # of a prompt
TEACHER_STEPS, START_STEPS, STEPS = 300, 200, 200
RATE, BATCH, SFT = 3e-3, 32, "sft"
SMALL = {**MODEL, "hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 32}
Row = dict[str, str]


@dataclass(frozen=True)
class Way:
    """A way to learn. replies: the data's (given), the same at other prompts (dealt), or the model's own. loss: sft
    reads no teacher."""

    replies: str
    loss: str
    is_taught: bool = True  # else the teacher has random weights

    @property
    def words(self) -> str:
        return f"{self.replies}, {self.loss}{'' if self.is_taught else ', untaught teacher'}"


WAYS = (
    Way("given", SFT),
    Way("given", "forward_kl"),
    Way("given", "js"),
    Way("own", "reverse_kl"),
    Way("own", "js"),
    Way("dealt", SFT),
    Way("dealt", "forward_kl"),
    Way("given", "forward_kl", is_taught=False),
    Way("own", "reverse_kl", is_taught=False),
)
COMPARED = Way("given", "forward_kl")


def distilled(folder: Path, options: argparse.Namespace) -> Table:
    draw = np.random.default_rng(10**6)
    held, taught = _rows(draw, HELD), _rows(draw, TAUGHT)
    teacher = _teacher(folder, taught)
    teachers = {True: teacher, False: _untaught(folder / "untaught", teacher)}
    before, found = list[list[float]](), {way: list[list[float]]() for way in WAYS}
    seeds = range(options.seed, options.seed + options.seeds)
    for seed in seeds:
        rows = _rows(np.random.default_rng(seed), GIVEN)
        start = _start(folder, seed, rows)
        before.append(_measures(start, teacher, held))
        print(seed, "before", *(f"{each:.3f}" for each in before[-1]), flush=True)
        for way, values in found.items():
            done = _distilled(folder, f"distilled-{seed}-{WAYS.index(way)}", way, start, teachers, rows, seed)
            values.append(_measures(done, teacher, held))
            print(seed, way.words, *(f"{each:.3f}" for each in values[-1]), flush=True)
    best = _measures(teacher, teacher, held)
    table = [["(the teacher)", *(f"{each:.3f}" for each in best), ""], ["before", *_means(before), ""]]
    for way, values in found.items():
        gains = [after[1] - other[1] for after, other in zip(values, found[COMPARED], strict=True)]
        table.append([way.words, *_means(values), "" if way == COMPARED else with_error(gains)])
    head = ["replies and loss", "right, likeliest", "right, drawn", "digits right, drawn", "nats from the teacher"]
    return _text(seeds), [*head, f"right, drawn: beside {COMPARED.words}"], table


def _text(seeds: range) -> str:
    return (
        f"A teacher of 128 x 3 learned to put {DIGITS} digits in order ({TEACHER_STEPS} steps of 64, sft). A model of "
        f"48 x 2 that learned the same for {START_STEPS} steps, from {GIVEN:,} rows, goes on for {STEPS} steps of "
        f"{BATCH} of their prompts: on the rows' replies (given), or on its own (`own_answers: 1`), by three "
        f"divergences from the teacher, and without it (sft). Of {HELD} prompts that neither was trained on: the share "
        "answered rightly by the likeliest tokens, and drawn at temperature 1; the share of a drawn answer's digits "
        "that are right; and how far the model is from the teacher, KL(model ‖ teacher) in nats an answer, estimated "
        f"at its drawn answers. Means of {len(seeds)} seeds ({seeds[0]} to {seeds[-1]}: data, start and draws; one "
        "teacher) with their standard errors; the last column is seed by seed. Rate and steps were chosen at seeds 0 "
        "and 100. Controls: a teacher of random weights, and replies dealt to other prompts, from which sft cannot "
        "learn the task; forward_kl can, since the teacher sees the prompt, and holds likely there what goes with it."
    )


def _means(values: Sequence[Sequence[float]]) -> list[str]:
    return [with_error(column) for column in zip(*values, strict=True)]


# --- the runs ---------------------------------------------------------------------------------------------------------


def _teacher(folder: Path, rows: list[Row]) -> Path:
    model = {"config": {**MODEL, "hidden_size": 128, "max_position_embeddings": 32}, "tokenizer": "characters"}
    data = {**_common(folder), "train": written(folder, "taught", rows)}
    return trained(folder, "teacher", run_of(SFT, model, data, 1e-3, 64, {"steps": TEACHER_STEPS})).checkpoint


def _untaught(folder: Path, teacher: Path) -> Path:
    """Writes a model of the teacher's form and tokens, with random weights."""
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(teacher)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder)
    return folder


def _start(folder: Path, seed: int, rows: list[Row]) -> Path:
    model = {"config": SMALL, "tokenizer": "characters"}
    data = {**_common(folder), "train": written(folder, f"given-{seed}", rows)}
    run = run_of(SFT, model, data, 1e-3, 64, {"steps": START_STEPS})
    return trained(folder, f"start-{seed}", {**run, "seed": seed}).checkpoint


def _distilled(
    folder: Path, name: str, way: Way, start: Path, teachers: Mapping[bool, Path], rows: list[Row], seed: int
) -> Path:
    data = {**_common(folder), "train": written(folder, name, _dealt(rows, seed) if way.replies == "dealt" else rows)}
    blocks = {}
    if way.loss != SFT:
        own = {"own_answers": 1.0, "max_new_tokens": DIGITS + 2} if way.replies == "own" else {}
        blocks = {"distillation": {"teacher": str(teachers[way.is_taught]), "loss": way.loss, **own}}
    stage = SFT if way.loss == SFT else "distill"
    run = run_of(stage, {"path": str(start)}, data, RATE, BATCH, {"steps": STEPS}, **blocks)
    return trained(folder, name, {**run, "seed": seed}).checkpoint


def _dealt(rows: list[Row], seed: int) -> list[Row]:
    """Returns the rows with each reply at another prompt."""
    order = np.random.default_rng([seed, 1]).permutation(len(rows))
    replies = {int(one): rows[int(other)]["output"] for one, other in zip(order, np.roll(order, 1), strict=True)}
    return [{**row, "output": replies[number]} for number, row in enumerate(rows)]


def _common(folder: Path) -> dict[str, Any]:
    return {"length": 32, "template": "plain", "cache": str(folder / "cache"), "evaluation_fraction": 0}


def _rows(draw: np.random.Generator, count: int) -> list[Row]:
    numbers = draw.integers(0, 10, (count, DIGITS))
    return [{"instruction": f"{_digits(row)}=", "output": _digits(np.sort(row))} for row in numbers]


def _digits(row: np.ndarray) -> str:
    return "".join(map(str, row.tolist()))


# --- what they learned ------------------------------------------------------------------------------------------------


def _measures(done: Path, teacher: Path, held: list[Row]) -> list[float]:
    """Returns the share of right answers by the likeliest tokens, and drawn; of right digits of drawn ones; and the
    nats an answer that the model is from the teacher."""
    asked, wanted = [row["instruction"] for row in held], [row["output"] for row in held]
    likeliest, drawn = ([each.strip() for each in answers(done, asked, DIGITS + 2, drawn=how)] for how in (False, True))
    right = [float(np.mean([a == b for a, b in zip(some, wanted, strict=True)])) for some in (likeliest, drawn)]
    digits = [sum(a == b for a, b in zip(*pair, strict=False)) / DIGITS for pair in zip(drawn, wanted, strict=True)]
    own, other = (_log_probabilities(each, asked, drawn) for each in (done, teacher))
    return [*right, float(np.mean(digits)), float(np.mean(np.subtract(own, other)))]


@torch.no_grad()
def _log_probabilities(checkpoint: Path, asked: Sequence[str], replies: Sequence[str]) -> list[float]:
    """Returns the log-probability of each reply with the token that ends it, where it has one."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    found = []
    for prompt, reply in zip(asked, replies, strict=True):
        talk = [{"role": "user", "content": prompt}]
        begun = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template([*talk, {"role": "assistant", "content": reply}], return_dict=False)
        tokens = torch.tensor(ids[: len(begun) + DIGITS + 2])  # a longer one was cut off before its end
        chances = model(tokens[None, :-1]).logits[0].log_softmax(-1)
        each = chances.gather(1, tokens[1:, None])[len(begun) - 1 :]
        found.append(float(each.sum()))
    return found
