"""Tests what a trace reports on the way, by a clock that the test moves."""

from __future__ import annotations

from drivetrain.prove.pace import Pace


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(seconds: list[float]) -> list[str]:
    words: list[str] = []
    clock = Clock()
    pace = Pace(len(seconds), words.append, clock)
    for each in seconds:
        clock.now += each
        pace.step_done()
    return words


def test_the_time_that_is_left_goes_by_the_steps_after_the_first() -> None:
    assert lines([60.0, 20.0, 20.0, 20.0]) == [
        "  step 2 of 4, about 40 s left of this part",
        "  step 3 of 4, about 20 s left of this part",
    ]
    assert lines([1.0, 90.0, 90.0])[0] == "  step 2 of 3, about 1 min 30 s left of this part"


def test_quick_steps_report_nothing() -> None:
    assert lines([0.1] * 40) == []
    assert len(lines([1.0] * 40)) == 7
