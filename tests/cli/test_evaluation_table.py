"""The table of several evaluations: a row of each where there is room, else a row of each metric; no name is cut."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from drivetrain.cli.evaluate import _table

METRICS = ("loss", "reward_chosen", "reward_rejected", "reward_accuracy", "logp_chosen", "logp_rejected")


def row(model: str, **more: Any) -> dict[str, Any]:
    metrics = {name: 0.5 + number for number, name in enumerate(METRICS)}
    intervals = {"reward_accuracy": [3.1, 3.9]}
    given = {"data": None, "checkpoint": "runs/a/step-00000030", "samples": 1200, "failure": None}
    return {**given, "model": model, "metrics": metrics, "intervals": intervals, "differences": {}, **more}


def printed(rows: list[dict[str, Any]], width: int) -> list[list[str]]:
    console = Console(width=width, highlight=False)
    with console.capture() as shown:
        console.print(_table(rows, console))
    return [line.split() for line in shown.get().splitlines()]


ROWS = [
    row("runs/one"),
    row("runs/two", differences={"loss": {"value": 0.1, "interval": [0.05, 0.15], "paired": True}}),
]


def test_a_wide_console_has_a_row_of_each_evaluation() -> None:
    head, one, two = printed(ROWS, 200)
    assert head == ["model", "step", "samples", "loss", "difference", *METRICS[1:]]
    assert one == ["runs/one", "30", "1,200", "0.5000", "1.5000", "2.5000", "3.5000", "[3.1000,", "3.9000]", *one[-2:]]
    assert two[3:7] == ["0.5000", "+0.1000", "[+0.0500,", "+0.1500]"]


@pytest.mark.parametrize("width", [80, 110])
def test_a_narrow_console_has_a_row_of_each_metric_with_its_whole_name(width: int) -> None:
    lines = printed(ROWS, width)
    assert lines[0] == ["model", "runs/one", "runs/two"]
    assert [line[0] for line in lines] == ["model", "step", "samples", "loss", "difference", *METRICS[1:]]
    assert lines[4] == ["difference", "+0.1000", "[+0.0500,", "+0.1500]"]
    assert lines[7] == ["reward_accuracy", *["3.5000", "[3.1000,", "3.9000]"] * 2]
