"""Trainings of small language models for bench/learning.py, and the answers of what they leave."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interleaved import child_environment
from transformers import AutoModelForCausalLM, AutoTokenizer

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Trained:
    """metrics: of the last evaluation. seconds: of the whole command."""

    checkpoint: Path
    metrics: dict[str, float]
    seconds: float


def trained(folder: Path, name: str, run: dict[str, Any]) -> Trained:
    """Runs `drivetrain train`. run: a run file without its output."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps({**run, "output": str(folder / name)}))
    began = time.monotonic()
    command = [sys.executable, "-m", "drivetrain", "train", str(file), "--quiet"]
    subprocess.run(command, check=True, env=child_environment())
    seconds = time.monotonic() - began
    report = json.loads((folder / name / "report.json").read_text())
    newest = max((folder / name / "checkpoints").glob("step-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return Trained(newest, report["metrics"], seconds)


def run_of(stage: str, model: Row, data: Row, lr: float, batch_size: int, loop: Row, **blocks: Any) -> dict[str, Any]:
    """Returns a run file. blocks: further ones of the workload, such as preference."""
    return {
        "workload": {"type": "language_model", "stage": stage, "model": model, "data": data, **blocks},
        "batch_size": batch_size,
        "loop": {"max_grad_norm": 1.0, **loop},
        "optimizer": {"name": "adamw", "lr": lr},
        "schedule": {"name": "cosine"},
    }


def written(folder: Path, name: str, rows: Sequence[Row]) -> str:
    """Writes rows as JSON Lines, and returns the file's path."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@torch.no_grad()
def answers(checkpoint: Path, asked: Sequence[str], tokens: int, drawn: bool) -> list[str]:
    """Returns an answer to each prompt through Transformers alone: drawn at temperature 1, or the likeliest tokens."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    talks = [[{"role": "user", "content": prompt}] for prompt in asked]
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    given = tokenizer.apply_chat_template(
        talks, add_generation_prompt=True, return_tensors="pt", padding=True, return_dict=True
    )
    given.pop("token_type_ids", None)
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or torch.get_num_threads())
    how: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0} if drawn else {"do_sample": False}
    made = model.generate(**given, **how, max_new_tokens=tokens, pad_token_id=tokenizer.pad_token_id)
    found: list[str] = tokenizer.batch_decode(made[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def with_error(values: Sequence[float], digits: int = 3) -> str:
    """Returns the mean and its standard error."""
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1) / math.sqrt(len(values)):.{digits}f}"


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Returns the interval of a share of `count` that holds 95 % (Wilson 1927)."""
    middle, spread = share + z**2 / (2 * count), z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return (middle - spread) / (1 + z**2 / count), (middle + spread) / (1 + z**2 / count)


def beaten(after: Sequence[float], before: Sequence[float]) -> list[float]:
    """Returns 1 where the answer after is the smaller, ½ where both are alike, else 0."""
    return [1.0 if one < other else 0.5 if one == other else 0.0 for one, other in zip(after, before, strict=True)]
