"""Tests what a user sees while a run goes on, on a terminal and off it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from drivetrain.tracking.events import (
    CheckpointSaved,
    Evaluated,
    EvaluationProgress,
    RolledOut,
    RunFinished,
    RunStarted,
    StepDone,
    Warned,
)
from drivetrain.tracking.progress import ProgressTracker

EVENTS = (
    Warned("[a] note"),
    RunStarted(
        "run", "runs/run", total_steps=20, first_step=0, samples_per_epoch=10, facts={"precision": "fp16-mixed"}
    ),
    StepDone(10, 0.5, 1.25, 2.0, 1e-3, 1024.0, 3, 100, 50.0, 2.0),
    EvaluationProgress(10, 1024, 3000),
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


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"world_size": 1, "local_parameters": 10, "global_parameters": 10, "trained_parameters": 10}, "parameters 10"),
        (
            {"world_size": 2, "local_parameters": 5, "global_parameters": 10, "trained_parameters": 1_000},
            "ranks 2, local parameters 5, parameters 10, trained parameters 1,000",
        ),
        ({"engine": "single", "rows_dropped": 0, "evaluation_samples": 0, "packed": True}, "engine single, packed yes"),
        ({"rows_dropped": 3, "evaluation_samples": 8, "chosen": {"a": 1}}, "rows dropped 3, evaluation samples 8"),
    ],
)
def test_the_first_line_leaves_out_what_others_say(facts: dict[str, Any], line: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=160, color_system=None, highlight=False)
    ProgressTracker(console=console).handle(RunStarted("run", "runs/run", 1, 0, 10, facts))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[1:] == [line]


def test_a_rate_below_one_is_no_zero() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=160, color_system=None, highlight=False)
    tracker = ProgressTracker(console=console)
    tracker.handle(RunStarted("run", "runs/run", 1, 0, 10, {}))
    tracker.handle(StepDone(1, 0.5, 1.0, 1.0, 1e-3, None, 0, 2, 0.0312, 2.0))
    assert isinstance(console.file, io.StringIO)
    assert "  0.031 samples/s" in console.file.getvalue()


def test_a_step_shows_the_reward_of_its_answers_and_its_loss_once() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=160, color_system=None, highlight=False)
    tracker = ProgressTracker(console=console)
    tracker.handle(RunStarted("run", "runs/run", 1, 0, 10, {}))
    tracker.handle(RolledOut(0, {"reward": 0.5, "reward_deviation": 0.1, "groups_without_signal": 0.25}))
    tracker.handle(StepDone(1, 0.5, 1.5, 1.0, 1e-3, None, 0, 2, 1.0, 2.0, terms={"loss": 1.25, "value": 2.5}))
    assert isinstance(console.file, io.StringIO)
    line = console.file.getvalue().splitlines()[-1]
    assert "  reward 0.5000  no signal 25%  loss 1.5000  value 2.5000  norm 1  " in line
    assert line.count("loss") == 1


def test_on_a_terminal_there_is_a_bar_with_time_left_and_evaluations_stay_above_it() -> None:
    text = shown(terminal=True)
    assert "20/20" in text
    assert "eta" in text
    assert "loss 1.0000" in text
    assert "accuracy 0.7500" in text


@pytest.mark.parametrize(("log_every", "seconds", "lines"), [(1, 30, 1), (10, 30, 9), (10, 4, 3), (1, 1, 1)])
def test_long_steps_show_their_answers_where_nothing_else_is_shown(
    log_every: int, seconds: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine steps: the first answers at once, later ones where no step was shown since, ten seconds apart at least."""
    now = [100.0]
    monkeypatch.setattr("drivetrain.tracking.progress.time.perf_counter", lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=False, width=160, color_system=None, highlight=False)
    tracker = ProgressTracker(console=console)
    tracker.handle(RunStarted("run", "runs/run", 1, 0, 100, {}))
    for step in range(9):
        now[0] += seconds / 2
        tracker.handle(RolledOut(step, {"reward": 0.5, "groups_without_signal": 0.25}))
        now[0] += seconds / 2
        if (step + 1) % log_every == 0:
            tracker.handle(StepDone(step + 1, 0.5, 1.5, 1.0, 1e-3, None, 0, 2, 1.0, 2.0))
    assert isinstance(console.file, io.StringIO)
    shown = [line for line in console.file.getvalue().splitlines() if "learning from new answers" in line]
    assert len(shown) == lines
    assert shown[0] == "step      1  learning from new answers  reward 0.5000  no signal 25%"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_evaluation_says_how_far_it_is(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100, 1000, 10))
    monkeypatch.setattr("drivetrain.tracking.progress.time.perf_counter", lambda: float(next(clock)))
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160, color_system=None, highlight=False)
    tracker = ProgressTracker(console=console)
    tracker.handle(RunStarted("run", "runs/run", 1, 0, 10, {}))
    tracker.handle(EvaluationProgress(1, 1024, 3000))
    if tracker._bar is not None:
        tracker._bar.refresh()
    assert isinstance(console.file, io.StringIO)
    assert "evaluating 1,024 of 3,000 samples" in console.file.getvalue()
    tracker.close()


def test_quiet_leaves_warnings_only() -> None:
    assert shown(terminal=False, quiet=True) == "note [a] note\n"
