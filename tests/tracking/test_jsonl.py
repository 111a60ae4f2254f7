"""events.jsonl: what is written is what is read, also after a kill."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.errors import RunError
from drivetrain.tracking.events import Evaluated, RunStarted, StepDone, Warned
from drivetrain.tracking.jsonl import FILE_NAME, JsonlTracker, read_events


def started(first_step: int = 0) -> RunStarted:
    return RunStarted("run", "runs/run", total_steps=100, first_step=first_step, samples_per_epoch=10)


def step(number: int, loss: float = 1.0) -> StepDone:
    return StepDone(number, 0.5, loss, 1.0, 1e-3, None, 0, 10 * number, 5.0, 2.0)


def test_every_event_is_a_line_with_its_kind_and_time(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    for event in (started(), step(1), Evaluated(1, {"accuracy": 0.5}, 0.1, best=True), Warned("careful: ü")):
        tracker.handle(event)
    tracker.close()
    events = list(read_events(tmp_path / FILE_NAME))
    assert [event["event"] for event in events] == ["run_started", "step", "evaluation", "warning"]
    assert events[1]["loss"] == 1.0
    assert events[2]["metrics"] == {"accuracy": 0.5}
    assert events[3]["message"] == "careful: ü"
    assert all(event["time"].endswith("+00:00") for event in events)


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    for event in (started(), *(step(n) for n in range(1, 9))):
        tracker.handle(event)
    resumed = JsonlTracker(tmp_path)
    for event in (started(first_step=5), *(step(n, loss=2.0) for n in range(6, 9))):
        resumed.handle(event)
    steps = [(e["step"], e["loss"]) for e in read_events(tmp_path / FILE_NAME) if e["event"] == "step"]
    assert steps == [(n, 1.0 if n <= 5 else 2.0) for n in range(1, 9)]


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.handle(started())
    tracker.handle(step(1))
    file = tmp_path / FILE_NAME
    file.write_text(file.read_text() + '{"event": "step", "st')
    assert len(list(read_events(file))) == 2
    JsonlTracker(tmp_path).handle(started(first_step=1))
    assert [event["event"] for event in read_events(file)] == ["run_started", "step", "run_started"]


def test_a_broken_line_within_a_file_costs_that_line_alone(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.handle(started())
    file = tmp_path / FILE_NAME
    file.write_text(file.read_text() + '{"event": "step", "st\n')
    tracker.handle(step(2))
    assert [event["event"] for event in read_events(file)] == ["run_started", "step"]


def test_what_a_kill_cut_off_does_not_spoil_what_is_said_next(tmp_path: Path) -> None:
    JsonlTracker(tmp_path).handle(started())
    file = tmp_path / FILE_NAME
    file.write_text(file.read_text() + '{"event": "step", "st')
    JsonlTracker(tmp_path).handle(Warned("before the run starts again"))
    assert [event["event"] for event in read_events(file)] == ["run_started", "warning"]


def test_a_last_line_whose_end_an_editor_took_is_kept(tmp_path: Path) -> None:
    JsonlTracker(tmp_path).handle(started())
    file = tmp_path / FILE_NAME
    file.write_text(file.read_text().rstrip("\n"))
    JsonlTracker(tmp_path).handle(Warned("next"))
    assert [event["event"] for event in read_events(file)] == ["run_started", "warning"]


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.handle(started())
    whole = (tmp_path / FILE_NAME).read_bytes()
    script = FILLED.format(most=len(whole) + 40, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "events.jsonl cannot be written: " in done.stderr
    assert (tmp_path / FILE_NAME).read_bytes() == whole


FILLED = """
import resource, signal
from pathlib import Path
from drivetrain.tracking.events import Warned
from drivetrain.tracking.jsonl import JsonlTracker
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))
JsonlTracker(Path({folder!r})).handle(Warned("x" * 200))
"""


def strictly(line: str) -> Any:
    """As a reader does that takes JSON at its word."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_numbers_that_json_lacks_are_null_for_others_and_themselves_for_us(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.handle(started())
    tracker.handle(step(1, loss=math.nan))
    tracker.handle(Evaluated(1, {"accuracy": 0.5, "perplexity": math.inf}, 0.1, best=True))
    tracker.handle(Warned("nan"))
    for resumed in (False, True):
        if resumed:  # what stays is written anew
            tracker.handle(started(first_step=1))
        lines = [strictly(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
        assert lines[1]["loss"] is None
        assert lines[1]["not_finite"] == {"loss": "nan"}
        assert lines[2]["metrics"] == {"accuracy": 0.5, "perplexity": None}
        assert lines[2]["not_finite"] == {"metrics": {"perplexity": "inf"}}
        _, stepped, evaluated, warned, *_ = read_events(tmp_path / FILE_NAME)
        assert math.isnan(stepped["loss"])
        assert evaluated["metrics"] == {"accuracy": 0.5, "perplexity": math.inf}
        assert warned["message"] == "nan", "a text is none of them"
        assert not any("not_finite" in event for event in (stepped, evaluated, warned))


def test_a_folder_that_is_gone_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot be written.*--resume"):
        JsonlTracker(tmp_path / "gone").handle(step(1))


@settings(deadline=None, max_examples=50)
@given(message=st.text(), loss=st.floats())
def test_any_text_and_number_is_one_line_of_json(
    message: str, loss: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("events")
    tracker = JsonlTracker(folder)
    tracker.handle(Warned(message.encode("utf-8", "replace").decode()))
    tracker.handle(step(1, loss))
    warned, stepped = read_events(folder / FILE_NAME)
    assert warned["message"] == message.encode("utf-8", "replace").decode()
    assert repr(stepped["loss"]) == repr(loss)
