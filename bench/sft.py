"""Supervised fine-tuning: drivetrain against the Transformers Trainer and TRL's SFTTrainer, in speed and memory.

    pip install -e ".[bench]"        # TRL
    python bench/sft.py --data alpaca_en_demo.json alpaca_zh_demo.json
    python bench/sft.py              # with made conversations

Same model folder, conversations, batch size, optimizer (AdamW, clipping at 1), learning rate and schedule, one epoch.
Target tokens are those of the replies. The clock is the training loop's: reading and tokenising are left out, as are
evaluation and saving. Memory is what the process takes above its imports, at its peak.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import run_files
import torch
from hf_sft import tokenised
from interleaved import Measurement, Pair, add_options, in_turns, measure, quartiles, repeat, undisturbed
from sft_data import conversations, model_folder, write_rows
from tables import machine_line, markdown_table, write
from transformers import AutoTokenizer

RESULTS = Path(__file__).resolve().parent / "results"
PADDED = {"workload.data.packing": False, "workload.data.group_by_length": False}
PLAIN = {"bf16": False, "gradient_checkpointing": False}  # TRL's own are True
OURS = "ours"


@dataclass(frozen=True)
class Case:
    name: str
    what: str
    speed: float | None  # what the ratio of target tokens a second is to reach
    memory: float | None  # what the ratio of peak memory may be at most
    side: str  # trainer, trl, or drivetrain with other settings
    model: str = "small"
    ours: dict[str, Any] = field(default_factory=dict)  # settings by dotted key
    theirs: dict[str, Any] = field(default_factory=dict)  # training arguments, or settings
    pads_to_length: bool = False
    adapter: dict[str, Any] | None = None  # theirs: LoRA of all linear layers, through PEFT


LORA = {"adapter": {"method": "lora", "rank": 16}}
NF4 = {"quantised_base": {"format": "nf4"}}
FUSED, ALL_LOGITS = {"workload.model.fused_loss": True}, {"workload.model.fused_loss": False}
BF16 = {"precision": "bf16-mixed"}
CASES = [
    Case("trainer-like", "padded to the longest of the batch, fp32, both", 1.0, 1.0, "trainer", ours=PADDED),
    Case("trl-like", "the same", 1.0, 1.0, "trl", ours=PADDED, theirs=PLAIN),
    Case("trainer-defaults", "each one's defaults: drivetrain packs", 2.0, 1.0, "trainer"),
    Case("trl-defaults", "each one's defaults: drivetrain packs, TRL has bf16 and recomputes", 4.0, 1.0, "trl"),
    Case("trl-defaults-bf16", "the same, drivetrain in bf16-mixed as well", 4.0, 1.0, "trl", ours=BF16),
    Case("trl-defaults-128k", "each one's defaults, 128,256 tokens", 4.0, 1.0, "trl", "128k"),
    Case("fused-128k", "`fused_loss`, TRL's defaults", 1.0, 0.7, "trl", "128k", ours=FUSED),
    Case("fused-128k-like", "`fused_loss`, padded, fp32, TRL so too", 1.0, 0.7, "trl", "128k", FUSED | PADDED, PLAIN),
    Case("packing-dynamic", "packed over padded to the longest, both drivetrain", 1.3, 1.0, OURS, theirs=PADDED),
    Case(
        "lora-like",
        "LoRA, padded, fp32, both",
        1.0,
        1.0,
        "trl",
        ours=PADDED | LORA,
        theirs=PLAIN,
        adapter={"rank": 16, "nf4": False},
    ),
    Case("lora-defaults", "LoRA, each one's defaults", 1.0, 1.0, "trl", ours=LORA, adapter={"rank": 16, "nf4": False}),
    Case(
        "qlora-like",
        "QLoRA (NF4), padded, fp32, both",
        1.0,
        1.0,
        "trl",
        ours=PADDED | LORA | NF4,
        theirs=PLAIN,
        adapter={"rank": 16, "nf4": True},
    ),
    Case("packing-length", "packed over padded to `length` (Trainer)", 3.0, 1.0, "trainer", pads_to_length=True),
]
# what each option does: drivetrain with it over drivetrain without
OPTIONS = [
    Case("compile", "`compile: true`", None, None, OURS, ours={"compile": True}),
    Case("bf16-mixed", "`precision: bf16-mixed`", None, None, OURS, ours=BF16),
    Case("recompute", "`recompute: true`", None, None, OURS, ours={"recompute": True}),
    Case("fused-8k", "`fused_loss: true`, 8,000 tokens", None, None, OURS, ours=FUSED, theirs=ALL_LOGITS),
    Case("fused-128k-own", "`fused_loss: true`, 128,256 tokens", None, None, OURS, "128k", FUSED, ALL_LOGITS),
    Case(
        "eager", "`attention: eager` (which cannot pack)", None, None, OURS, ours={"workload.model.attention": "eager"}
    ),
    Case("neftune", "`neftune_alpha: 5`", None, None, OURS, ours={"workload.model.neftune_alpha": 5.0}),
    Case("allocator", "`allocator: system`", None, None, OURS, ours={"allocator": "system"}),
]


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)  # before hours of measuring
    with tempfile.TemporaryDirectory(prefix="sft-") as folder:
        task = prepare(options, Path(folder))
        found: list[tuple[Case, list[Pair]]] = []
        for case in [case for case in CASES + OPTIONS if case.name in options.cases]:
            pairs: list[Pair] = []
            found.append((case, pairs))
            for pair in measured(case, task, options):
                pairs.append(pair)
                print("  ".join([case.name, *pair_row(len(pairs), pair)]), flush=True)
            options.output.joinpath("sft.md").write_text(page(found, task, options))
        write(options.output / "sft.md", page(found, task, options))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="drivetrain against the Transformers Trainer and TRL")
    names = [case.name for case in CASES + OPTIONS]
    parser.add_argument("--cases", nargs="+", default=names, choices=names)
    add_options(parser, pairs=5)
    parser.add_argument("--data", nargs="*", type=Path, default=[], help="alpaca JSON files; left out, made")
    parser.add_argument("--samples", type=int, default=160, help="conversations")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a conversation at most (TRL's default)")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the page")
    return parser.parse_args()


@dataclass(frozen=True)
class Task:
    folder: Path
    train: Path
    evaluation: Path
    models: dict[str, Path]
    targets: int
    length: int
    batch_size: int = 8  # the Trainer's and TRL's default
    lr: float = 1e-3


def prepare(options: argparse.Namespace, folder: Path) -> Task:
    every = conversations(options.data, options.samples)
    rows = every[: options.samples]
    small = {"vocabulary": 8_000, "width": options.width, "blocks": options.blocks}
    wide = {"vocabulary": 128_256, "width": 128, "blocks": 4}
    models = {
        name: model_folder(folder / name, every, tokens=8_000, length=options.length, **sizes)
        for name, sizes in {"small": small, "128k": wide}.items()
    }
    tokenizer = AutoTokenizer.from_pretrained(models["small"])
    labels = [tokenised(tokenizer, row, options.length)["labels"] for row in rows]
    targets = sum(label >= 0 for each in labels for label in each)
    train, evaluation = write_rows(folder / "train.jsonl", rows), write_rows(folder / "evaluation.jsonl", rows[:2])
    return Task(folder, train, evaluation, models, targets, options.length)


# --- the two sides ---------------------------------------------------------------------------------------------------


def measured(case: Case, task: Task, options: argparse.Namespace) -> Iterator[Pair]:
    def pair(number: int) -> Pair:
        mine = run_files.write_run(task.folder / "ours.yaml", our_run(case, task, number, case.ours))

        def ours() -> Measurement:
            return our_measurement(mine, task)

        def theirs() -> Measurement:
            if case.side == OURS:
                other = our_run(case, task, number, case.theirs)
                return our_measurement(run_files.write_run(task.folder / "other.yaml", other), task)
            other = their_run(case, task, number)
            return measure(
                "hf_sft.py", run_files.write_run(task.folder / "theirs.json", other), task.folder / "theirs.out"
            )

        return in_turns(ours, theirs, number, options.foreign)

    return repeat(pair, options.pairs, options.attempts)


def our_measurement(run_file: Path, task: Task) -> Measurement:
    found = measure("ours.py", run_file, task.folder / "ours.json")
    facts = found.facts
    loop = facts["loop_seconds"] - facts["parts"].get("save", 0.0)
    loss = statistics.fmean(facts["losses"].values())
    return Measurement(task.targets / loop, found.foreign_cores, {"memory": facts["memory"], "loss": loss})


def our_run(case: Case, task: Task, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    source = {"path": str(task.train), "formatting": "alpaca", "columns": {"prompt": "prompt", "response": "response"}}
    run: dict[str, Any] = {
        "workload": {
            "type": "language_model",
            "stage": "sft",
            "model": {"path": str(task.models[case.model])},
            "data": {
                "train": [source],
                "evaluation": [{**source, "path": str(task.evaluation)}],
                "length": task.length,
                "cache": str(task.folder / f"cache-{seed}"),
            },
        },
        "seed": seed,
        "batch_size": task.batch_size,
        "loop": {"epochs": 1, "max_grad_norm": 1.0},
        "tracking": {"log_every": 1},  # the Trainer's loss is the mean of all steps
        "optimizer": {"name": "adamw", "lr": task.lr},
        "schedule": {"name": "linear"},
        "output": str(task.folder / "run"),
    }
    for key, value in settings.items():
        *blocks, last = key.split(".")
        inner = run
        for block in blocks:
            inner = inner[block]
        inner[last] = value
    return run


def their_run(case: Case, task: Task, seed: int) -> dict[str, Any]:
    arguments = {
        "output_dir": str(task.folder / "their-run"),
        "per_device_train_batch_size": task.batch_size,
        "num_train_epochs": 1,
        "learning_rate": task.lr,
        "seed": seed,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),  # TRL refuses its own bf16 on a CPU else
        **case.theirs,
    }
    return {
        "side": case.side,
        "arguments": arguments,
        "seed": seed,
        "model": str(task.models[case.model]),
        "train": str(task.train),
        "targets": task.targets,
        "length": task.length,
        "pads_to_length": case.pads_to_length,
        "adapter": case.adapter,
    }


# --- what is told ----------------------------------------------------------------------------------------------------


def memory_ratio(pair: Pair) -> float:
    return float(pair.ours.facts["memory"] / pair.theirs.facts["memory"])


def pair_row(number: int, pair: Pair) -> list[str]:
    return [
        str(number),
        f"{pair.ours.rate:,.0f}",
        f"{pair.theirs.rate:,.0f}",
        f"{pair.ratio:.2f}",
        f"{pair.ours.facts['memory'] / 2**20:,.0f}",
        f"{pair.theirs.facts['memory'] / 2**20:,.0f}",
        f"{memory_ratio(pair):.2f}",
        f"{pair.ours.facts['loss']:.3f}",
        f"{pair.theirs.facts['loss']:.3f}",
        f"{pair.foreign_cores:.3f}" + (" (discarded)" if pair.disturbed else ""),
    ]


def summary_row(case: Case, pairs: Sequence[Pair]) -> list[str]:
    good = undisturbed(pairs)
    head = [case.name, case.what, f"{len(good)} of {len(pairs)}"]
    if not good:
        return [*head, *["no undisturbed pair"] * 4]
    low, median, high = quartiles([pair.ratio for pair in good])
    memory = statistics.median(memory_ratio(pair) for pair in good)
    return [
        *head,
        f"{median:.2f} ({low:.2f} to {high:.2f})",
        reached(case.speed, median >= (case.speed or 0)),
        f"{memory:.2f}",
        reached(case.memory, memory <= (case.memory or 0)),
    ]


def reached(target: float | None, yes: bool) -> str:
    return "" if target is None else f"{target} {'reached' if yes else 'MISSED'}"


def page(found: Sequence[tuple[Case, list[Pair]]], task: Task, options: argparse.Namespace) -> str:
    head = [
        "case",
        "what",
        "pairs kept",
        "target tokens/s, ratio (quartiles)",
        "at least",
        "peak memory, ratio",
        "at most",
    ]
    each = ["pair", "target tokens/s", "theirs", "ratio", "memory, MiB", "theirs", "ratio", "mean loss", "theirs"]
    tables = [
        f"{case.name}\n\n"
        + markdown_table([*each, "foreign cores"], [pair_row(number, pair) for number, pair in enumerate(pairs, 1)])
        for case, pairs in found
    ]
    data = "alpaca conversations" if options.data else "made conversations"
    return "\n".join(
        [
            "# Supervised fine-tuning: drivetrain, the Transformers Trainer and TRL",
            "",
            "Ratios are drivetrain's over the other's: of speed above 1 and of memory below 1 drivetrain is better. "
            "Fresh processes in turns, order swapped from pair to pair, a new seed for each pair; pairs with more than "
            f"{options.foreign} cores of foreign work are discarded. `python bench/sft.py` repeats it.",
            "",
            machine_line() + f" TRL {trl_version()}.",
            "",
            f"Work: {options.samples} {data} with {task.targets:,} target tokens, at most {task.length:,} tokens each, "
            f"batch {task.batch_size}, one epoch; Llama {options.width} wide with {options.blocks} blocks and 8,000 "
            "tokens; 128 wide with 4 blocks where it has 128,256. fp32 but for TRL's defaults: bf16 and recompute.",
            "",
            markdown_table(head, [summary_row(case, pairs) for case, pairs in found]),
            "",
            *tables,
            "",
        ]
    )


def trl_version() -> str:
    from importlib.metadata import version

    return version("trl")


if __name__ == "__main__":
    main()
