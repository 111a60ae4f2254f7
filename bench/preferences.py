"""Preferences and rewards: drivetrain against TRL's DPO, KTO, reward and GRPO trainers, in speed and memory.

    pip install -e ".[bench]"                                     # TRL
    python bench/preferences.py --data dpo_en_demo.json           # LLaMA-Factory's
    python bench/preferences.py                                   # with made pairs

Same model folder, rows in the same order, batch size, optimizer (AdamW, clipping at 1), learning rate and schedule, one
epoch. Rows longer than the context are left out, since the two cut them in different ways. So the losses of each step
agree, and the bench stops where they do not (`check_losses`). The clock is the training loop's: reading and tokenising
are left out, as are evaluation and saving; answers of GRPO and their rewards are within. Memory is what the process
takes above its imports, at its peak; drivetrain computes rewards in a process beside, which does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import interleaved
import numpy as np
import run_files
import torch
from interleaved import BENCH, Measurement, Pair, add_options, in_turns, measure, quartiles, repeat, undisturbed
from sft import memory_ratio, reached, trl_version
from sft_data import conversations, model_folder, write_rows
from tables import machine_line, markdown_table, write
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from drivetrain.data.order import GlobalOrder
from drivetrain.runtime.native_bfloat16 import device_with_bfloat16

RESULTS = BENCH / "results"
STAGES = ("dpo", "kto", "reward", "grpo")
DEFAULTS = {"speed": 3.0, "memory": 0.7}  # the goals
LIKE = {"speed": 1.3, "memory": None}
PADDED = {"workload.data.packing": False}
PLAIN = {"bf16": False, "gradient_checkpointing": False}  # TRL's own are True
BF16 = {"precision": "bf16-mixed"}
LR = 1e-5
# how far the losses of a step may be apart, relative to the larger. In bf16 logits have 8 bits. KTO estimates its
# divergence on prompts with answers of other rows, which the two choose in different ways; GRPO draws other answers
TOLERANCES = {"dpo": 1e-4, "kto": 0.1, "reward": 1e-4}
TOLERANCE_BF16 = 2e-2
BATCH = 8  # TRL's default; of GRPO 8 answers to one prompt
LENGTH = 1024


@dataclass(frozen=True)
class Case:
    name: str
    stage: str
    what: str
    speed: float | None  # what the ratio of samples a second is to reach
    memory: float | None  # what the ratio of peak memory may be at most
    ours: dict[str, Any] = field(default_factory=dict)  # settings by dotted key
    theirs: dict[str, Any] = field(default_factory=dict)  # arguments of the trainer


def cases() -> Iterator[Case]:
    for stage in STAGES:
        dapo = {"workload.reinforcement.loss": "dapo"} if stage == "grpo" else {}
        yield Case(f"{stage}-defaults", stage, "each one's defaults; TRL has bf16 and recomputes", **DEFAULTS)
        yield Case(
            f"{stage}-defaults-bf16",
            stage,
            "the same, drivetrain in bf16-mixed" + (", as its init writes it here" if device_with_bfloat16() else ""),
            **DEFAULTS,
            ours=BF16,
        )
        # a processor without instructions for bf16 computes TRL's default by other ones, which takes far longer
        what = "the same, TRL in fp32 too"
        yield Case(f"{stage}-defaults-fp32", stage, what, None, None, theirs={"bf16": False})
        yield Case(f"{stage}-like", stage, "padded, fp32, both", **LIKE, ours=PADDED | dapo, theirs=PLAIN)
    cached, ahead = {"workload.preference.reference": "cached"}, {"precompute_ref_log_probs": True}
    what = "the reference computed once, which the clock leaves out"
    yield Case("dpo-cached", "dpo", f"defaults, {what}", None, None, ours=cached, theirs=ahead)


CASES = list(cases())


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)  # before hours of measuring
    interleaved.PATIENCE_SECONDS = options.patience
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BENCH), os.environ.get("PYTHONPATH")]))  # of rewards
    with tempfile.TemporaryDirectory(prefix="preferences-") as folder:
        task = prepare(options, Path(folder))
        found: list[tuple[Case, list[Pair]]] = []
        for case in [case for case in CASES if case.name in options.cases]:
            pairs: list[Pair] = []
            found.append((case, pairs))
            for pair in measured(case, task, options):
                pairs.append(pair)
                print("  ".join([case.name, *pair_row(len(pairs), pair)]), flush=True)
            options.output.joinpath("preferences.md").write_text(page(found, task, options))
        write(options.output / "preferences.md", page(found, task, options))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="drivetrain against TRL's trainers of preferences and rewards")
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", default=names, choices=names)
    add_options(parser, pairs=3)
    parser.add_argument("--data", type=Path, help="dpo_en_demo.json; left out, pairs are made")
    parser.add_argument(
        "--samples", type=int, default=48, help="pairs of answers; of kto, answers; of grpo, six prompts"
    )
    parser.add_argument("--new-tokens", type=int, default=128, help="grpo: tokens of an answer at most")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--patience", type=float, default=120, help="seconds to wait for an idle machine at most")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the page")
    return parser.parse_args()


# --- the work --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    folder: Path
    model: Path
    classifier: Path  # the same model with a score in place of the head, for reward
    rows: dict[str, list[dict[str, Any]]]  # by stage
    ours: dict[str, Path]  # stage → the rows as drivetrain reads them
    samples: dict[str, int]  # stage → what is counted: pairs, labelled answers, drawn answers
    new_tokens: int


def prepare(options: argparse.Namespace, folder: Path) -> Task:
    every = pairs_of(options.data) if options.data else made_pairs(4 * options.samples)
    if options.samples > len(every):
        raise SystemExit(f"{options.samples} pairs are asked for; {options.data} holds {len(every)}")
    texts = [{"p": row["prompt"][-1]["content"], "c": row["chosen"][0]["content"]} for row in every]
    sizes = {"tokens": 8_000, "vocabulary": 8_000, "width": options.width, "blocks": options.blocks}
    model = model_folder(folder / "model", texts, length=LENGTH + options.new_tokens, **sizes)
    rows = those_that_fit(every, model)[: options.samples]
    labelled = [
        {"prompt": row["prompt"], "completion": row["rejected" if n % 2 else "chosen"], "label": n % 2 == 0}
        for n, row in enumerate(rows)
    ]
    few = rows[: max(options.samples // BATCH, 1)]
    contents = {"dpo": rows, "kto": labelled, "reward": rows, "grpo": [{"prompt": row["prompt"]} for row in few]}
    counts = {stage: len(content) * (BATCH if stage == "grpo" else 1) for stage, content in contents.items()}
    read = {**contents, "grpo": [{"messages": row["prompt"] + row["chosen"]} for row in few]}
    ours = {stage: write_rows(folder / f"ours-{stage}.jsonl", content) for stage, content in read.items()}
    return Task(folder, model, with_a_score(model, folder / "classifier"), contents, ours, counts, options.new_tokens)


def those_that_fit(rows: Sequence[dict[str, Any]], model: Path) -> list[dict[str, Any]]:
    """Returns the rows of which neither side is longer than LENGTH."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokens(messages: list[dict[str, str]]) -> int:
        return len(tokenizer(tokenizer.apply_chat_template(messages, tokenize=False)).input_ids)

    return [row for row in rows if max(tokens(row["prompt"] + row[side]) for side in ("chosen", "rejected")) <= LENGTH]


def with_a_score(model: Path, folder: Path) -> Path:
    """Writes the model as a classifier of one label, so that both sides begin with the same random score."""
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def pairs_of(file: Path) -> list[dict[str, Any]]:
    """LLaMA-Factory's pairs of one or more turns, as TRL's messages; system messages are left out."""

    def message(given: dict[str, str]) -> dict[str, str]:
        return {"role": "user" if given["from"] == "human" else "assistant", "content": given["value"].strip()}

    return [
        {
            "prompt": [message(each) for each in row["conversations"] if each["from"] in ("human", "gpt")],
            "chosen": [message(row["chosen"])],
            "rejected": [message(row["rejected"])],
        }
        for row in json.loads(file.read_text(encoding="utf-8"))
        if row["chosen"]["value"].strip() != row["rejected"]["value"].strip()
    ]


def made_pairs(count: int) -> list[dict[str, Any]]:
    others = conversations([], count, seed=1)
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["response"]}],
            "rejected": [{"role": "assistant", "content": other["response"]}],
        }
        for row, other in zip(conversations([], count), others, strict=True)
    ]


# --- the two sides ---------------------------------------------------------------------------------------------------


def measured(case: Case, task: Task, options: argparse.Namespace) -> Iterator[Pair]:
    def pair(number: int) -> Pair:
        mine = run_files.write_run(task.folder / "ours.json", our_run(case, task, number))
        write_rows(task.folder / f"theirs-{case.stage}.jsonl", in_our_order(task.rows[case.stage], case, number))
        other = run_files.write_run(task.folder / "theirs.json", their_run(case, task, number))

        def theirs() -> Measurement:
            return measure("hf_preferences.py", other, task.folder / "theirs.out")

        found = in_turns(lambda: our_measurement(mine, case, task), theirs, number, options.foreign)
        check_losses(case, found)
        return found

    return repeat(pair, options.pairs, options.attempts)


def in_our_order(rows: Sequence[dict[str, Any]], case: Case, seed: int) -> list[dict[str, Any]]:
    """Returns the rows as drivetrain takes them in an epoch with this seed; TRL takes them as they stand."""
    order = GlobalOrder(len(rows), batch_of(case.stage), seed)
    return [rows[index] for step in range(int(order.steps_per_epoch)) for index in order.batch(step)[1]]


def batch_of(stage: str) -> int:
    """Returns the rows of a step."""
    return 1 if stage == "grpo" else BATCH


def check_losses(case: Case, pair: Pair) -> None:
    """Stops the bench where the two sides compute other losses of the same rows: they would not do the same work."""
    if case.stage not in TOLERANCES:
        return
    ours, theirs = (np.array(side.facts["losses"]) for side in (pair.ours, pair.theirs))
    is_plain = "bf16" in case.theirs and case.ours.get("precision") is None  # both in fp32
    bound = TOLERANCES[case.stage] if is_plain else max(TOLERANCES[case.stage], TOLERANCE_BF16)
    if ours.shape != theirs.shape or not np.allclose(ours, theirs, rtol=bound, atol=0):
        raise SystemExit(f"{case.name}: losses of steps differ by more than {bound:g}: {ours} and TRL's {theirs}")


def our_measurement(run_file: Path, case: Case, task: Task) -> Measurement:
    found = measure("ours.py", run_file, task.folder / "ours.out")
    loop = found.facts["loop_seconds"] - found.facts["parts"].get("save", 0.0)
    losses = list(found.facts["losses"].values())
    facts = {"memory": found.facts["memory"], "losses": losses, "parts": found.facts["parts"]}
    answers = task.folder / "run" / "samples.jsonl"
    if case.stage == "grpo":
        made = [json.loads(line)["answer_tokens"] for line in answers.read_text().splitlines()]
        facts["answer_tokens"] = statistics.fmean(made)
    samples = task.samples[case.stage]
    facts["processor_rate"] = samples / found.facts["loop_processor_seconds"]
    return Measurement(samples / loop, found.foreign_cores, facts)


def our_run(case: Case, task: Task, seed: int) -> dict[str, Any]:
    data = {
        "train": str(task.ours[case.stage]),
        "length": LENGTH,
        "cache": str(task.folder / f"cache-{seed}"),
    }
    workload: dict[str, Any] = {
        "type": "language_model",
        "stage": case.stage,
        "model": {"path": str(model_of(case, task))},
        "data": {**data, "evaluation_fraction": 0},
        "preference": {},
    }
    if case.stage == "grpo":
        learning = {"rewards": "answer_rewards:distinct", "answers": BATCH, "max_new_tokens": task.new_tokens}
        workload["reinforcement"] = learning
    run: dict[str, Any] = {
        "workload": workload,
        "seed": seed,
        "batch_size": batch_of(case.stage),
        "loop": {"epochs": 1, "max_grad_norm": 1.0},
        "tracking": {"log_every": 1},
        "optimizer": {"name": "adamw", "lr": LR},
        "schedule": {"name": "linear"},
        "output": str(task.folder / "run"),
    }
    for key, value in case.ours.items():
        *blocks, last = key.split(".")
        inner = run
        for block in blocks:
            inner = inner[block]
        inner[last] = value
    return run


def model_of(case: Case, task: Task) -> Path:
    return task.classifier if case.stage == "reward" else task.model


def their_run(case: Case, task: Task, seed: int) -> dict[str, Any]:
    arguments = {
        "output_dir": str(task.folder / "their-run"),
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 1,
        "learning_rate": LR,
        "seed": seed,
        "save_strategy": "no",
        "report_to": "none",
        "train_sampling_strategy": "sequential",  # rows are written in drivetrain's order
        "logging_steps": 1,
        "use_cpu": not torch.cuda.is_available(),  # TRL refuses its own bf16 on a CPU else
        **({"max_completion_length": task.new_tokens, "shuffle_dataset": False} if case.stage == "grpo" else {}),
        **case.theirs,
    }
    if case.stage == "grpo":
        del arguments["train_sampling_strategy"]
    return {
        "stage": case.stage,
        "arguments": arguments,
        "seed": seed,
        "model": str(model_of(case, task)),
        "train": str(task.folder / f"theirs-{case.stage}.jsonl"),
        "samples": task.samples[case.stage],
    }


# --- the page --------------------------------------------------------------------------------------------------------


def pair_row(number: int, pair: Pair) -> list[str]:
    sides = pair.ours.facts, pair.theirs.facts
    return [
        str(number),
        *(f"{side.rate:.2f}" for side in (pair.ours, pair.theirs)),
        f"{pair.ratio:.2f}",
        f"{processor_ratio(pair):.2f}",
        *(f"{facts['memory'] / 2**20:,.0f}" for facts in sides),
        f"{memory_ratio(pair):.2f}",
        *(f"{statistics.fmean(facts['losses']):.4f}" for facts in sides),
        *(f"{facts.get('answer_tokens') or 0:.0f}" for facts in sides),
        f"{pair.foreign_cores:.3f}" + (" (discarded)" if pair.disturbed else ""),
    ]


def processor_ratio(pair: Pair) -> float:
    """Returns how many more samples a second of processor time takes: the ratio that other work disturbs least."""
    return float(pair.ours.facts["processor_rate"] / pair.theirs.facts["processor_rate"])


def summary_row(case: Case, pairs: Sequence[Pair]) -> list[str]:
    good = undisturbed(pairs)
    head = [case.name, case.what, f"{len(good)} of {len(pairs)}"]
    if not good:
        return [*head, *["no undisturbed pair"] * 4]
    low, median, high = quartiles([processor_ratio(pair) for pair in good])
    memory = statistics.median(memory_ratio(pair) for pair in good)
    return [
        *head,
        f"{median:.2f} ({low:.2f} to {high:.2f})",
        reached(case.speed, median >= (case.speed or 0)),
        f"{memory:.2f}",
        reached(case.memory, memory <= (case.memory or 0)),
    ]


def page(found: Sequence[tuple[Case, list[Pair]]], task: Task, options: argparse.Namespace) -> str:
    head = ["case", "what", "pairs kept", "samples, ratio (quartiles)", "at least", "peak memory, ratio", "at most"]
    each = [
        "pair",
        "samples/s",
        "theirs",
        "ratio",
        "by processor time",
        "memory, MiB",
        "theirs",
        "ratio",
    ]
    each += ["mean loss", "theirs", "answer tokens", "theirs", "foreign cores"]
    tables = [
        f"{case.name}\n\n"
        + markdown_table(each, [pair_row(number, pair) for number, pair in enumerate(pairs, 1)])
        + "\n"
        for case, pairs in found
    ]
    data = options.data.name if options.data else "made ones"
    counted = ", ".join(f"{stage} {count}" for stage, count in task.samples.items())
    return "\n".join(
        [
            "# Preferences and rewards: drivetrain and TRL",
            "",
            "Ratios are drivetrain's over TRL's: of samples a second of processor time above 1 and of memory below 1 "
            "drivetrain is better. Fresh "
            "processes in turns, order swapped from pair to pair, a new seed for each pair; pairs with more than "
            f"{options.foreign} cores of foreign work are discarded. `python bench/preferences.py` repeats it. "
            "Rows longer than the context are left out and both sides take the others in one order, so that the losses "
            f"of each step agree: to {TOLERANCES['dpo']:g} in fp32 for dpo and reward, to {TOLERANCE_BF16:.0%} where a "
            f"side computes in bf16, and to {TOLERANCES['kto']:.0%} for kto, whose mismatched answers each draws in "
            "its own way.",
            "",
            machine_line() + f" TRL {trl_version()}.",
            "",
            f"Work: one epoch of pairs of answers ({data}), at most {LENGTH:,} tokens each, batch {BATCH}; samples: "
            f"{counted} (grpo: answers of at most {options.new_tokens} tokens, {BATCH} to a prompt). Llama "
            f"{options.width} wide with {options.blocks} blocks and 8,000 tokens, random weights. fp32 but for TRL's "
            "defaults, bf16 and recompute, and where a case is named bf16.",
            "",
            markdown_table(head, [summary_row(case, pairs) for case, pairs in found]),
            "",
            *tables,
        ]
    )


if __name__ == "__main__":
    main()
