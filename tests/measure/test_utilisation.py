"""Utilisation: a busy processor against a sleeping one."""

from __future__ import annotations

import time

import torch

from drivetrain.hardware import usable_cores
from drivetrain.measure.utilisation import MOST_POINTS, UtilisationSampler

CPU = torch.device("cpu")


def busy_until(deadline: float) -> None:
    while time.process_time() < deadline:
        sum(range(1000))


def test_one_busy_core_reads_as_its_share_and_sleep_as_nothing() -> None:
    with UtilisationSampler(CPU, every_seconds=0.05) as busy:
        busy_until(time.process_time() + 0.6)
    with UtilisationSampler(CPU, every_seconds=0.05) as idle:
        time.sleep(0.4)
    share = 1 / usable_cores()
    assert 0.1 * share < busy.summary()["mean"] <= 1.3 * share
    assert idle.summary()["mean"] < 0.3 * busy.summary()["mean"]
    assert busy.summary()["peak"] >= busy.summary()["mean"]


def test_a_run_shorter_than_an_interval_still_has_a_sample() -> None:
    with UtilisationSampler(CPU, every_seconds=10) as sampler:
        pass
    assert sampler.summary()["samples"] == 1


def test_the_series_stays_short_and_covers_the_whole_run() -> None:
    with UtilisationSampler(CPU, every_seconds=0.0002) as sampler:
        time.sleep(2.0)
    series = sampler.summary()["series"]
    assert 0 < len(series) <= MOST_POINTS
    assert series[0][0] < 0.5
    assert series[-1][0] > 1.0
