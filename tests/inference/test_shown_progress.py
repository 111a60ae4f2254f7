"""The line of predictions counts answers that come together as they come: together."""

from __future__ import annotations

from drivetrain.inference.verbs import in_bursts


def test_rows_that_come_together_are_counted_together() -> None:
    reached: list[int] = []
    rows = [{"sample": number} for number in range(10)]
    assert list(in_bursts(rows, 4, reached.append)) == rows
    assert reached == [4, 8], "of the last two it is not known how long they took"
    reached.clear()
    list(in_bursts(rows, 1, reached.append))
    assert reached == [*range(1, 11)]
