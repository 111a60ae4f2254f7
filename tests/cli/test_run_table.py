"""Tests what a finished run's table says, and what it leaves out."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from drivetrain.cli.run_table import report_table
from drivetrain.training.report import RunReport
from tests.compare.made import report

WHOLE = {"trained_parameters": 1000, "global_parameters": 1000, "wrapper": "Module"}


def lines(made: RunReport) -> dict[str, str]:
    """First column → second column."""
    written = io.StringIO()
    table = report_table(made)
    Console(file=written, width=300, color_system=None).print(table)
    rows = [line.strip("│ ").split("│") for line in written.getvalue().splitlines() if line.startswith("│")]
    assert all(len(row) == 2 for row in rows)
    return {name.strip(): value.strip() for name, value in rows}


def test_the_parts_of_the_time_of_a_resumed_run_are_those_since_it_went_on() -> None:
    assert "of which" in lines(report(engaged=WHOLE))
    shown = lines(report(engaged=WHOLE, first_step=1200))
    assert "of which" not in shown
    assert shown["of which since step 1,200"].startswith("data 0.5 s")


def test_a_plain_run_shows_no_line_of_what_it_did_not_do() -> None:
    shown = lines(report(engaged=WHOLE))
    assert shown["engine"] == "single (Module)"
    assert shown["parameters"] == "1,000"
    assert shown["time"] == "10.0 s"
    assert shown["samples/s"] == "100.0"
    assert shown["peak memory"] == "tensor 1.0 MiB, resident 10.0 MiB"
    assert shown["utilisation"] == "mean 80%, peak 90%"
    assert (shown["checkpoint"], shown["accuracy"]) == ("none", "0.9000")
    assert not {"restarts", "held", "model FLOP/s", "sent a step", "stages wait"} & shown.keys()


def test_a_run_that_learned_from_rewards_shows_them_without_an_evaluation() -> None:
    answers = {"batches": 5.0, "reward": 0.75, "first_reward": 0.25, "groups_without_signal": 0.125}
    expected = "reward 0.7500 in the last 5 batches, 0.2500 in the first 5; 12% of the last groups without signal"
    made = report(engaged=WHOLE, metrics={}, best=None, answers=answers)
    assert lines(made)["answers"] == made.summary()["answers"] == expected
    alone = report(engaged=WHOLE, answers={"batches": 1.0, "reward": 0.75, "first_reward": 0.75})
    assert lines(alone)["answers"] == "reward 0.7500 in the last batch, 0.7500 in the first"
    assert "answers" not in lines(report(engaged=WHOLE))


def test_ranks_are_summed_up_by_the_one_that_sends_most_and_by_the_mean_of_each_stage() -> None:
    ranks: list[dict[str, Any]] = [
        {"stage": 0, "waiting_share": 0.1, "bubble": 0.2, "sent_bytes_per_step": {"all_reduce": 2**20}},
        {"stage": 0, "waiting_share": 0.3, "bubble": 0.2, "sent_bytes_per_step": {"all_reduce": 3 * 2**20}},
        {"stage": 1, "waiting_share": 0.5, "bubble": 0.2, "sent_bytes_per_step": None},
    ]
    shown = lines(report(engine="mesh", engaged=WHOLE, ranks=ranks))
    assert shown["engine"] == "mesh (Module, 3 ranks)"
    assert shown["stages wait"] == "20%, 50% of each window (20% is the schedule's bubble)"
    assert shown["sent a step"] == "all-reduce 3.0 MiB (by the rank that sends most)"
    assert shown["peak memory"].endswith("(of the rank that needs most)")


def test_a_schedule_without_a_known_bubble_shows_what_stages_wait_alone() -> None:
    shown = lines(report(engaged=WHOLE, ranks=[{"stage": 0, "waiting_share": 0.25, "bubble": None}]))
    assert shown["stages wait"] == "25% of each window"


@pytest.mark.parametrize(
    ("changes", "row", "text"),
    [
        ({"restarts": ["killed"], "effective_share": 0.75}, "restarts", "1; 75% of the time since the launch counts"),
        ({"seconds": 90.0}, "time", "1.5 min"),
        (
            {"flops_per_second": 2e9, "matmul_flops_per_second": 4e9},
            "model FLOP/s",
            "2.00 GFLOP/s (50% of the device's",
        ),
        ({"flops_per_second": 2e9}, "model FLOP/s", "2.00 GFLOP/s"),
        (
            {"flops_per_second": 6.9e9, "matmul_flops_per_second": 2e9},
            "model FLOP/s",
            "6.90 GFLOP/s (no share: large products, timed after the last step, reached 2.00 GFLOP/s; other programs",
        ),
        ({"checkpoint": "step-10", "best_checkpoint": None}, "best", "not kept (accuracy 0.9000 at step 10)"),
        ({"emulated": True}, "precision", "fp32 (emulated)"),
    ],
)
def test_what_a_run_did_has_its_line(changes: dict[str, Any], row: str, text: str) -> None:
    assert lines(report(**({"engaged": WHOLE} | changes)))[row].startswith(text)


def test_a_run_that_trains_a_part_shows_the_share_and_what_it_holds() -> None:
    part = {"trained_parameters": 10, "global_parameters": 1000, "wrapper": "Module"}
    held = {"frozen": 99 * 2**20, "weights": 2**20, "gradients": 2**20, "optimizer": 2 * 2**20}
    shown = lines(report(engaged=part, ranks=[{"held_bytes": held}]))
    assert shown["parameters"] == "trained: 10 of 1,000 (1.00%)"
    assert shown["held"] == (
        "frozen 99.0 MiB, weights 1.0 MiB, gradients 1.0 MiB, optimizer 2.0 MiB "
        "(26% of what training all would hold)"  # 103 MiB of the 4 MiB of a hundredth, a hundred times
    )
