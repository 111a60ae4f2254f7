"""Runs on all pairs of rows with several answers: a resume to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_language import write_lines

Run = Callable[..., tuple[int, str, str]]
SIZES = "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 4}"
ROWS = [
    {"prompt": f"ask {n}", "responses": ["yes " * (n % 3 + 1), "no", "never"], "scores": [3, 2, 1 + n % 2]}
    for n in range(12)
]


def trained(drivetrain: Run, name: str, *more: str) -> None:
    data = "{train: scored.jsonl, pairs: all, template: plain, length: 48, evaluation_fraction: 0.25, cache: cache}"
    blocks = [f"workload={{type: language_model, stage: dpo, model: {{config: {SIZES}}}, data: {data}}}"]
    blocks += [f"output={name}", "batch_size=4", "loop.epochs=2", "tracking.log_every=1", "checkpoints.keep_last=99"]
    code, _, words = drivetrain("train", "run.yaml", *blocks, "checkpoints.every_steps=3", "--quiet", *more)
    assert code == 0, words


def points(name: str) -> list[tuple[float, ...]]:
    events = map(json.loads, Path(name, "events.jsonl").read_text().splitlines())
    return [(e["step"], e["loss"], e["grad_norm"]) for e in events if e["event"] == "step"]


def test_a_run_that_was_cut_off_within_an_epoch_goes_on_to_the_bit(
    drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("{}")
    write_lines(Path("scored.jsonl"), ROWS)
    trained(drivetrain, "whole")
    report = json.loads(Path("whole", "report.json").read_text())
    pairs = sum(3 if n % 2 == 0 else 2 for n in range(12))
    assert 2 * 9 < report["samples"] < 2 * pairs, "of nine of the twelve rows, all pairs, twice"
    shutil.copytree("whole", "cut")
    steps = sorted(Path("cut", "checkpoints").glob("step-*"))
    for step in steps[1:]:
        shutil.rmtree(step)
    trained(drivetrain, "cut", "--resume")
    assert points("cut") == points("whole")
    last = steps[-1].name
    one, other = (Path(name, "checkpoints", last, "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert one == other
