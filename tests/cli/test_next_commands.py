"""Tests what a user may type next."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from drivetrain.cli.next_commands import next_commands
from drivetrain.config.run import RunConfig

WORKLOAD = {"type": "module", "path": "mine.py"}


def run(**loop: int) -> RunConfig:
    return RunConfig.model_validate(
        {"name": "mine", "output": "runs/my run", "workload": WORKLOAD, "batch_size": 4, "loop": loop}
    )


def test_a_completed_run_is_predicted_with_looked_at_and_trained_longer() -> None:
    found = dict(next_commands(Path("my run.yaml"), ["lr=3e-4"], run(epochs=5), "completed"))
    assert list(found) == ["predict", "its page", "train longer"]
    words = shlex.split(found["train longer"])
    assert words == ["drivetrain", "train", "my run.yaml", "lr=3e-4", "loop.epochs=10", "--resume"]
    assert shlex.split(found["its page"])[2:] == ["runs/my run", "--output", "runs/my run/page.html"]


def test_a_run_that_was_made_longer_by_an_override_is_made_longer_by_one() -> None:
    found = dict(next_commands(Path("run.yaml"), ["lr=1", "loop.steps=16", "steps=9"], run(steps=16), "completed"))
    assert found["train longer"] == "drivetrain train run.yaml lr=1 loop.steps=32 --resume"


def test_without_evaluation_data_nothing_is_predicted() -> None:
    assert "predict" not in dict(next_commands(Path("run.yaml"), [], run(steps=5), "completed", evaluated=False))


def test_after_adapters_the_merge_is_named() -> None:
    model = {"type": "language_model", "stage": "sft", "model": {"path": "base"}, "data": {"train": "rows.json"}}
    given = {"name": "mine", "workload": model, "batch_size": 4, "loop": {"steps": 5}}
    lora, prompt = (RunConfig.model_validate({**given, "adapter": method}) for method in ("lora", "prompt"))
    found = dict(next_commands(Path("run.yaml"), [], lora, "completed"))
    assert found["merge into the base, verified"] == (
        "drivetrain export runs/mine --to transformers --output runs/mine-exported"
    )
    assert "merge into the base, verified" not in dict(next_commands(Path("run.yaml"), [], prompt, "completed"))


def test_a_language_model_is_asked_and_its_predictions_hold_answers_of_several_lines() -> None:
    data = {"train": "rows.json", "evaluation_fraction": 0.1}
    model = {"type": "language_model", "stage": "sft", "model": {"path": "base"}, "data": data}
    given = {"name": "mine", "workload": model, "batch_size": 4, "loop": {"steps": 5}}
    found = dict(next_commands(Path("run.yaml"), [], RunConfig.model_validate(given), "completed"))
    assert (found["ask it"], found["serve it"]) == ("drivetrain chat runs/mine", "drivetrain serve runs/mine")
    assert found["predict"] == "drivetrain predict run.yaml --output mine-predictions.jsonl"
    reward = {**given, "workload": {**model, "stage": "reward"}}
    assert "ask it" not in dict(next_commands(Path("run.yaml"), [], RunConfig.model_validate(reward), "completed"))


def test_an_interrupted_run_goes_on() -> None:
    (found,) = next_commands(Path("run.yaml"), [], run(steps=5), "interrupted")
    assert found == ("go on", "drivetrain train run.yaml --resume")


@pytest.mark.parametrize("length", [{"epochs": 3}, {"steps": 7}])
def test_a_longer_run_has_the_length_that_the_run_file_gives(length: dict[str, int]) -> None:
    commands = dict(next_commands(Path("run.yaml"), [], run(**length), "completed"))
    ((key, value),) = length.items()
    assert f"loop.{key}={2 * value}" in commands["train longer"]
