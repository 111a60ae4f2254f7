"""An override of one of two exclusive fields replaces the other one in the run file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config import rules
from drivetrain.config.load import load, replaced
from drivetrain.config.machine import Machine
from drivetrain.launch.prepare import checked

CPU = Machine("cpu", "a CPU", 1, 2**33, 2, None, frozenset({"float32"}))


def run_file(folder: Path, **settings: Any) -> Path:
    (folder / "own.py").touch()
    raw = {"workload": {"type": "module", "path": str(folder / "own.py")}, "batch_size": 4, "loop": {"epochs": 3}}
    (folder / "run.yaml").write_text(json.dumps(raw | settings))
    return folder / "run.yaml"


@pytest.mark.parametrize(
    ("settings", "override", "left"),
    [
        ({}, "loop.steps=40", {"loop.epochs": None, "loop.steps": 40}),
        ({"loop": {"steps": 9, "max_grad_norm": 2.0}}, "epochs=2", {"loop.steps": None, "loop.max_grad_norm": 2.0}),
        ({}, "batch_size_per_device=2", {"batch_size": None, "batch_size_per_device": 2}),
        ({"schedule": {"warmup_ratio": 0.1}}, "warmup_steps=5", {"schedule.warmup_ratio": 0.0}),
        ({"micro_batch_tokens": 99}, "micro_batch_size=auto", {"micro_batch_tokens": None}),
        ({"micro_batch_tokens": 99}, "micro_batch_size=2", {"micro_batch_tokens": 99, "micro_batch_size": 2}),
        ({"schedule": {"warmup_steps": 5}}, "warmup_ratio=0", {"schedule.warmup_steps": 5}),
        ({}, "loop={steps: 40}", {"loop.epochs": None, "loop.steps": 40}),
    ],
)
def test_an_override_replaces_the_other_field_of_the_run_file(
    settings: dict[str, Any], override: str, left: dict[str, Any], tmp_path: Path
) -> None:
    run, problems = load(run_file(tmp_path, **settings), [override])
    assert run is not None
    assert [*problems, *rules.check(run, CPU)] == []
    for field, value in left.items():
        found: Any = run
        for name in field.split("."):
            found = getattr(found, name)
        assert found == value, field


def test_what_an_override_replaces_is_noted(tmp_path: Path) -> None:
    path, words = run_file(tmp_path), "loop.steps was given: it takes the place of the run file's loop.epochs (3)"
    assert words in checked(path, ["loop.steps=40"]).notices
    assert replaced(path, ["loop.epochs=null", "loop.steps=40"]) == []
    assert replaced(path, ["loop.epochs=4"]) == []


@pytest.mark.parametrize(
    ("settings", "overrides"),
    [
        ({}, ["loop.steps=40", "loop.epochs=2"]),
        ({}, ["loop={steps: 4, epochs: 2}"]),
        ({"loop": {"epochs": 3, "steps": 4}}, []),
    ],
)
def test_two_that_stand_side_by_side_are_refused(
    settings: dict[str, Any], overrides: list[str], tmp_path: Path
) -> None:
    run, _ = load(run_file(tmp_path, **settings), overrides)
    assert run is not None
    assert [each.why for each in rules.check(run, CPU)] == ["of epochs and steps both were given"]
