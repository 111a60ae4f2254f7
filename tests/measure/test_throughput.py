"""Rates and the division of time."""

from __future__ import annotations

import time

import pytest
import torch

from drivetrain.measure.matmul import matmul_rate
from drivetrain.measure.throughput import Stopwatch, Throughput


def test_only_steady_steps_make_the_steady_rate() -> None:
    throughput = Throughput()
    throughput.add(100, 10.0, steady=False)
    throughput.add(30, 1.0, steady=True)
    throughput.add(30, 2.0, steady=True)
    assert throughput.steady_rate() == pytest.approx(20.0)


def test_without_a_steady_step_there_is_no_rate() -> None:
    throughput = Throughput()
    throughput.add(100, 1.0, steady=False)
    assert throughput.steady_rate() is None


def test_the_recent_rate_is_since_it_was_last_asked() -> None:
    throughput = Throughput()
    throughput.add(10, 1.0, steady=False)
    assert throughput.recent() == pytest.approx(10.0)
    throughput.add(40, 2.0, steady=True)
    assert throughput.recent() == pytest.approx(20.0)
    assert throughput.recent() == 0.0


def test_a_part_sums_its_seconds_also_when_it_fails() -> None:
    stopwatch = Stopwatch(torch.device("cpu"))
    with stopwatch.part("data"):
        time.sleep(0.02)
    with pytest.raises(ZeroDivisionError), stopwatch.part("data"):
        _ = time.sleep(0.02) or 1 / 0
    with stopwatch.part("save"):
        pass
    assert stopwatch.seconds["data"] >= 0.04
    assert stopwatch.seconds["save"] < stopwatch.seconds["data"]


def test_the_recent_seconds_of_parts_are_those_since_they_were_last_asked() -> None:
    stopwatch = Stopwatch(torch.device("cpu"))
    stopwatch._add("data", 2.0)
    assert stopwatch.recent() == {"data": 2.0}
    stopwatch._add("save", 0.5)
    stopwatch._add("data", 1.0)
    assert stopwatch.recent() == {"data": 1.0, "save": 0.5}
    assert stopwatch.recent() == {}
    assert stopwatch.seconds == {"data": 3.0, "save": 0.5}


def test_the_matmul_rate_is_what_a_product_of_our_own_reaches() -> None:
    rate = matmul_rate(torch.device("cpu"), torch.float32)
    left, right = torch.ones(1024, 1024), torch.ones(1024, 1024)
    left @ right
    start = time.perf_counter()
    left @ right
    ours = 2 * 1024**3 / (time.perf_counter() - start)
    assert ours / 20 < rate < ours * 20  # the machine may be busy; a wrong power of ten is what would be found
