"""The line says how far work is, how fast it goes and how long it will take."""

from __future__ import annotations

import pytest

from drivetrain.runtime import progress_line
from drivetrain.runtime.progress_line import SAMPLES, ProgressLine
from tests.clock import Clock, clock_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return clock_of(progress_line, monkeypatch)


def test_quick_work_shows_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine("tokenising", 3_000_000)
    clock.now = 1.0
    line.add(3_000_000)
    line.end()
    assert capsys.readouterr().err == ""


def test_rate_and_remaining_time_are_those_of_this_process(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine("tokenising", 130_000_000, done=70_000_000)
    clock.now = 4.0
    line.add(10_000_000)
    assert capsys.readouterr().err == "tokenising: 80 of 130 MB, 2.5 MB/s, 0 min 20 s left\n"


def test_off_a_terminal_a_line_comes_every_ten_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine("evaluating", 1000, unit=SAMPLES)
    for second in range(1, 26):
        clock.now = float(second)
        line.reach(10 * second)
    found = capsys.readouterr().err.splitlines()
    assert found == [
        "evaluating: 20 of 1,000 samples, 10 samples/s, 1 min 38 s left",
        "evaluating: 120 of 1,000 samples, 10 samples/s, 1 min 28 s left",
        "evaluating: 220 of 1,000 samples, 10 samples/s, 1 min 18 s left",
    ]


def test_a_terminal_shows_much_work_at_once_and_one_line_that_changes(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    line = ProgressLine("reading a.csv", 50_000_000)
    clock.now = 0.6
    line.add(6_000_000)
    line.end()
    assert capsys.readouterr().err == (
        "reading a.csv: 50 MB\rreading a.csv: 6 of 50 MB, 10.0 MB/s, 0 min 4 s left   \n"
    )
