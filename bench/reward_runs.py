"""The runs of bench/reward_kills.py, each in a folder with its data, what it was asked for, and what it left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.directory import newest_good
from drivetrain.tracking.jsonl import read_events
from tests.tiny_language import LLAMA, write_lines


class Place:
    """A run's folder with its data, what was asked for, and what it left."""

    command = ("train", "run.json", "--quiet", "--resume")

    def __init__(self, folder: Path, name: str, steps: int) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "run.json").write_text(json.dumps(run_file(name, folder, steps)))
        self.environment = {"REWARD_CALLS": str(folder / "rewards"), "ANSWER_CALLS": str(folder / "answers")}

    @property
    def has_cached(self) -> bool:
        return any((self.folder / "cache").glob("reference-*.npy"))

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-4000:]

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint that is good; 0 if there is none."""
        path, _ = newest_good(self.folder / "run" / "checkpoints")
        return 0 if path is None else int(path.name.removeprefix("step-"))

    @property
    def first_step(self) -> int | None:
        """The step that the last start which came so far went on from."""
        return next((e["first_step"] for e in reversed(self.events) if e["event"] == "run_started"), None)

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "run" / "events.jsonl"
        return list(read_events(path)) if path.exists() else []

    def calls(self, name: str) -> list[tuple[int, list[str]]]:
        """Returns (start, what was asked for) of each call. A rank's start is the number of its process."""
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [(start, [json.dumps(each) for each in asked]) for start, asked in map(json.loads, lines)]


def run_file(name: str, folder: Path, steps: int) -> dict[str, Any]:
    data = {"train": _rows(name, folder), "template": "chatml", "length": 64, "evaluation_fraction": 0}
    workload: dict[str, Any] = {
        "type": "language_model", "stage": name, "model": {"config": LLAMA},
        "data": {**data, "cache": str(folder / "cache")},
    }  # fmt: skip
    learning = {"rewards": "bench.killed_rewards:letters", "max_new_tokens": 16, "beta": 0.05}
    workload |= {
        "grpo": {"reinforcement": {**learning, "answers": 4, "updates": 2}},
        "ppo": {"reinforcement": {**learning, "updates": 2}},
        "dpo": {"preference": {"reference": "cached"}},
        "distill": {"distillation": {"teacher": str(folder / "teacher"), "own_answers": 0.5, "max_new_tokens": 16}},
    }[name]
    if name == "distill":
        _teacher(folder / "teacher")
    return {
        "workload": workload,
        "batch_size": {"grpo": 4, "ppo": 12}.get(name, 8),
        "micro_batch_size": 8,
        "loop": {"steps": steps, "max_grad_norm": 1.0},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "checkpoints": {"every_steps": 3, "keep_last": 2},
        "tracking": {"log_every": 1, "trackers": []},
        "output": str(folder / "run"),
    }


def _rows(name: str, folder: Path) -> str:
    if name == "dpo":  # so many that a pass over them takes a while
        sides = [{"prompt": f"say {n}", "chosen": f"{n} " * (1 + n % 5), "rejected": f"no {n}"} for n in range(1, 1201)]
        return write_lines(folder / "rows.jsonl", sides)
    return write_lines(folder / "rows.jsonl", [{"instruction": f"say {n}", "output": str(n)} for n in range(60)])


def _teacher(folder: Path) -> None:
    """Writes a model of other weights than the one that is trained."""
    import torch

    from drivetrain.config.language import LanguageModel
    from drivetrain.workloads.language_model import LanguageModelWorkload

    data = {"train": _rows("sft", folder.parent), "template": "chatml", "length": 64, "cache": str(folder / "cache")}
    block = {"stage": "sft", "model": {"config": {**LLAMA, "hidden_size": 48}}, "data": data}
    made = LanguageModelWorkload(LanguageModel.model_validate(block), 0)
    torch.manual_seed(5)
    model: Any = made.build_model()
    model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
