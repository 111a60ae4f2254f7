"""The line that says what is being done, on stderr, while the result may go to a file."""

from __future__ import annotations

import pytest

from drivetrain.runtime import status_line
from drivetrain.runtime.status_line import StatusLine
from tests.clock import Clock, clock_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(status_line, "LOOKED_EVERY", 1e6)  # tests look themselves
    return clock_of(status_line, monkeypatch)


def test_off_a_terminal_a_line_comes_every_twenty_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    line = StatusLine("planning")
    for second in range(1, 66):
        clock.now = float(second)
        line.say(f"trace {second}")
        line.look()
    found = capsys.readouterr()
    assert found.out == "", "which takes the result"
    assert found.err.splitlines() == [
        "planning: trace 20, 0 min 20 s",
        "planning: trace 40, 0 min 40 s",
        "planning: trace 60, 1 min 0 s",
    ]


def test_a_long_piece_of_work_is_shown_again_with_its_time(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    line = StatusLine("planning")
    line.say("trace 1")
    for clock.now in (25.0, 30.0, 50.0):
        line.look()
    assert capsys.readouterr().err == "planning: trace 1, 0 min 25 s\nplanning: trace 1, 0 min 50 s\n"


def test_a_terminal_shows_one_line_that_changes_and_goes_before_the_result(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with StatusLine("planning") as line:
        line.look()
        line.say("trace 1, of engine=fsdp")
        clock.now = 1.0
        line.look()
        assert capsys.readouterr().err == "", "quick work shows nothing"
        clock.now = 3.0
        line.look()
        line.say("trace 2")
        line.look()
        found = capsys.readouterr()
    shown = "planning: trace 1, of engine=fsdp, 0 min 3 s"
    assert found.err.startswith(f"\r{shown}\r{'planning: trace 2, 0 min 3 s'.ljust(len(shown))}")
    assert capsys.readouterr().err.endswith(f"\r{' ' * len('planning: trace 2, 0 min 3 s')}\r")
    assert found.out == ""


def test_nothing_is_shown_before_there_is_something_to_say(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with StatusLine("planning") as line:
        clock.now = 100.0
        line.look()
    assert capsys.readouterr().err == ""
