"""Utilisation: a busy processor against a sleeping one."""

from __future__ import annotations

import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from drivetrain.measure.utilisation import MOST_POINTS, UtilisationSampler, _Cpu
from drivetrain.runtime.hardware import usable_cores

CPU = torch.device("cpu")


def test_the_mean_is_the_processor_time_used_over_what_there_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.active_children", list)  # ranks of other tests, which come and go
    with UtilisationSampler(CPU, every_seconds=0.05) as busy:
        wall, used = time.perf_counter(), time.process_time()
        while time.process_time() < used + 0.6:
            sum(range(1000))
        # not one core's share: threads of another test's products may still be spinning
        expected = (time.process_time() - used) / (time.perf_counter() - wall) / usable_cores()
    assert busy.summary()["mean"] == pytest.approx(expected, rel=0.3)
    assert 1 >= busy.summary()["peak"] >= busy.summary()["mean"]


def test_the_recent_share_is_that_since_it_was_last_asked() -> None:
    sampler, shares = UtilisationSampler(CPU, every_seconds=1e9), iter([0.0, 0.2, 0.8, 0.8, 0.8])
    sampler._source = SimpleNamespace(read=lambda: next(shares), extra=dict)  # type: ignore[assignment]
    with sampler:
        assert sampler.recent() is None, "no sample was taken"
        sampler._take()
        assert sampler.recent() == pytest.approx(0.2)
        sampler._take()
        sampler._take()
        assert sampler.recent() == pytest.approx(0.8)
        assert sampler.recent() is None


def test_workers_count_as_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose processor time grows by a second; another that has ended."""
    spent = iter([0.0, 1.0])

    def process(pid: int) -> SimpleNamespace:
        if pid == 2:
            raise psutil.NoSuchProcess(pid)
        return SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=next(spent), system=5.0))

    monkeypatch.setattr("multiprocessing.active_children", lambda: [SimpleNamespace(pid=2), SimpleNamespace(pid=1)])
    monkeypatch.setattr("psutil.Process", process)
    monkeypatch.setattr("time.process_time", lambda: 3.0)
    clock = iter([0.0, 2.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert _Cpu().read() == pytest.approx(0.5 / usable_cores())


def test_sleep_reads_as_nothing() -> None:
    time.sleep(0.5)  # until no thread spins any more
    with UtilisationSampler(CPU, every_seconds=0.05) as idle:
        time.sleep(0.4)
    assert idle.summary()["mean"] < 0.15


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
