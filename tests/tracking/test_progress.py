"""Tests what a user sees while a run goes on, on a terminal and off it."""

from __future__ import annotations

import io

from rich.console import Console

from drivetrain.tracking.events import CheckpointSaved, Evaluated, RunFinished, RunStarted, StepDone, Warned
from drivetrain.tracking.progress import ProgressTracker

EVENTS = (
    Warned("[a] note"),
    RunStarted(
        "run", "runs/run", total_steps=20, first_step=0, samples_per_epoch=10, facts={"precision": "fp16-mixed"}
    ),
    StepDone(10, 0.5, 1.25, 2.0, 1e-3, 1024.0, 3, 100, 50.0, 2.0),
    Evaluated(10, {"accuracy": 0.75}, 0.5, best=True),
    CheckpointSaved(10, "runs/run/checkpoints/step-00000010", 2**20, 0.1),
    StepDone(20, 1.0, 1.0, 2.0, 1e-4, 1024.0, 3, 200, 50.0, 4.0),
    RunFinished("completed", 20, "completed at step 20"),
)


def shown(terminal: bool, quiet: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160, color_system=None, highlight=False)
    tracker = ProgressTracker(quiet, console)
    for event in EVENTS:
        tracker.handle(event)
    tracker.close()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_off_a_terminal_lines_are_plain_and_whole() -> None:
    text = shown(terminal=False)
    assert "\x1b" not in text
    assert "[a] note" in text
    assert "step     10/20 (50%)  epoch 0.50  loss 1.2500" in text
    assert "scale 1024  skipped 3" in text
    assert "50 samples/s" in text
    assert "accuracy 0.7500" in text
    assert "saved runs/run/checkpoints/step-00000010 (1.0 MiB)" in text
    assert text.rstrip().endswith("completed at step 20")


def test_a_rate_below_one_is_no_zero() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=160, color_system=None, highlight=False)
    tracker = ProgressTracker(console=console)
    tracker.handle(RunStarted("run", "runs/run", 1, 0, 10, {}))
    tracker.handle(StepDone(1, 0.5, 1.0, 1.0, 1e-3, None, 0, 2, 0.0312, 2.0))
    assert isinstance(console.file, io.StringIO)
    assert "  0.031 samples/s" in console.file.getvalue()


def test_on_a_terminal_there_is_a_bar_with_time_left_and_evaluations_stay_above_it() -> None:
    text = shown(terminal=True)
    assert "20/20" in text
    assert "eta" in text
    assert "loss 1.0000" in text
    assert "accuracy 0.7500" in text


def test_quiet_leaves_warnings_only() -> None:
    assert shown(terminal=False, quiet=True) == "note [a] note\n"
