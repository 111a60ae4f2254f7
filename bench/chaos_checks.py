"""Compares a disturbed run, once it has ended, with an undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.faults import FAULTS
from bench.killing import Disturbed
from drivetrain.tracking.jsonl import read_events
from tests.launch.chaos import same_end
from tests.launch.history import VARIABLE, check_each_once, surviving

STEPS, BATCH, SAMPLES = 240, 64, 1498  # ten epochs


def check(whole: Disturbed, run: Disturbed, copies: int) -> None:
    """AssertionError unless a disturbed run came to what the undisturbed one did."""
    output = run.folder / run.output
    same_end(whole.folder / whole.output, output)
    taken = [surviving(Path(each.environment[VARIABLE]), copies) for each in (whole, run)]
    check_each_once(taken[1], STEPS, SAMPLES)
    assert taken[0] == taken[1], "a step took other samples"
    report = json.loads((output / "report.json").read_text())
    assert report["status"] == "completed"
    events = list(read_events(output / "events.jsonl"))
    began = [event["first_step"] for event in events if event["event"] == "run_started"]
    trained = began[-1] < STEPS  # else the ranks outlived their launching process, and --resume found no step to do
    if trained:
        check_restarts(run, report)
    check_times(run, report, trained)
    ended = [event["status"] for event in events if event["event"] == "run_finished"]
    assert ended[-1] == "completed"


def check_restarts(run: Disturbed, report: dict[str, Any]) -> None:
    """As many as there were deaths since the last launch: nothing else died. A lost node may be two."""
    deaths = 0
    for made in run.made:
        does = FAULTS[made.fault.what]
        deaths = 0 if does.relaunches else deaths + does.ends
    found = report["restarts"]
    most = deaths * run.nodes
    assert deaths <= len(found) <= most, f"{deaths} deaths since the last launch, but {found}"


def check_times(run: Disturbed, report: dict[str, Any], trained: bool = True) -> None:
    """No clock's jump is in them: none is negative, and the share of the launch that counts is right.

    trained: False where --resume had no step to do: the report is that of the launch before, or has a share of nought.
    """
    negative = [key for key, value in report.items() if "seconds" in key and isinstance(value, float) and value < 0]
    assert not negative, f"{negative} are negative"
    share = report["effective_share"]
    assert 0 <= share <= 1, share
    assert share or not trained, share
    if not run.relaunched:
        share = report["seconds"] / run.lasted
        assert share <= report["effective_share"] <= min(1, 3 * share + 0.3), (share, report["effective_share"])
