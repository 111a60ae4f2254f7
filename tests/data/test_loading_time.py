"""Tests how many processes load samples, where the run file leaves it out. A stand-in clock is moved by the samples."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.config.training import Loader
from drivetrain.data import loader, loading_time
from drivetrain.data.loader import training_windows
from drivetrain.data.loading_time import workers_for
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.data.streams.mixture import Mix, StreamedMixture

_REAL = loading_time._pools, loading_time._threads


class Clock:
    seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


class Samples:
    def __init__(self, clock: Clock, seconds: float, again: float | None = None, sample: Any = 0) -> None:
        self.clock, self.seconds, self.sample = clock, seconds, sample
        self.again = seconds if again is None else again
        self.seen: set[int] = set()
        self.loads = 0

    def __len__(self) -> int:
        return 100

    def load(self, index: int, epoch: int) -> Any:
        del epoch
        self.clock.seconds += self.again if index in self.seen else self.seconds
        self.seen.add(index)
        self.loads += 1
        return self.sample


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(loading_time, "time", made)
    monkeypatch.setattr(loading_time, "usable_cores", lambda: 6)
    monkeypatch.setattr(loading_time, "_open_files", list)
    monkeypatch.setattr(loading_time, "_pools", list)  # pytest's process may have some
    monkeypatch.setattr(loading_time, "_threads", lambda: 1)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return made


class Pooled(Samples):
    """Loads by threads of its own, which a forked process would not have."""

    def load(self, index: int, epoch: int) -> Any:
        if not hasattr(self, "pool"):
            self.pool = ThreadPoolExecutor(1)
        return self.pool.submit(super().load, index, epoch).result()


def test_a_data_set_with_threads_of_its_own_is_loaded_where_they_are(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools, threads = _REAL
    monkeypatch.setattr(loading_time, "_threads", threads)
    started_now = Pooled(clock, 0.005)
    assert workers_for(started_now) == 0
    monkeypatch.setattr(loading_time, "_pools", pools)
    started_before = Pooled(clock, 0.005)
    started_before.load(0, 0)
    assert workers_for(started_before) == 0
    for samples in (started_now, started_before):
        samples.pool.shutdown()


def test_samples_that_cost_time_get_the_cores_but_one(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert workers_for(Samples(clock, 0.005)) == 5
    monkeypatch.setattr(loading_time, "usable_cores", lambda: 64)
    assert workers_for(Samples(clock, 0.005)) == loading_time.MOST_WORKERS
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert workers_for(Samples(clock, 0.005)) == 3, "of the rank's own share of cores"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert workers_for(Samples(clock, 0.005)) == 2, "one would make samples no quicker than the rank itself"


def test_samples_that_are_there_get_none(clock: Clock) -> None:
    assert workers_for(Samples(clock, 0.00005)) == 0
    assert workers_for(Samples(clock, 0.05, again=0.0)) == 0, "a data set that keeps what it made"


def test_they_are_timed_once_and_not_for_long(clock: Clock) -> None:
    samples = Samples(clock, 2.0)
    assert [workers_for(samples), workers_for(samples)] == [5, 5]
    assert samples.loads == 2


def test_what_other_processes_could_not_load_stays_here(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert workers_for(Samples(clock, 0.005, sample=(torch.zeros(1, device="meta"), 1))) == 0
    assert workers_for(StreamedMixture([], Mix())) == 0
    monkeypatch.setattr(loading_time, "usable_cores", lambda: 1)
    assert workers_for(Samples(clock, 0.005)) == 0, "no core is left"


def test_what_a_sample_raises_is_left_to_the_run(clock: Clock) -> None:
    class Failing(Samples):
        def load(self, index: int, epoch: int) -> Any:
            raise KeyError(index, epoch)

    assert workers_for(Failing(clock, 0.005)) == 0


def test_an_open_file_is_not_shared_by_processes(clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    (tmp_path / "data.bin").write_bytes(b"numbers")
    with (tmp_path / "data.bin").open("rb"), (tmp_path / "log").open("w"):
        held = loading_time._open_files()
        assert str(tmp_path / "data.bin") in held
        assert str(tmp_path / "log") not in held, "nobody reads it"
    monkeypatch.setattr(loading_time, "time", clock)
    monkeypatch.setattr(loading_time, "usable_cores", lambda: 6)
    monkeypatch.setattr(loading_time, "_open_files", lambda: ["data.bin"])
    assert workers_for(Samples(clock, 0.005)) == 0


def test_processes_that_are_not_forked_get_no_samples_unasked(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_time, "multiprocessing", multiprocessing.get_context("spawn"))
    monkeypatch.setattr(multiprocessing.context.SpawnContext, "get_context", lambda self: self)
    assert workers_for(Samples(clock, 0.005)) == 0


class Numbers:
    def __len__(self) -> int:
        return 20

    def load(self, index: int, epoch: int) -> float:
        return index + epoch / 10


def test_workers_that_auto_started_change_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers(workers: int) -> list[list[float]]:
        monkeypatch.setattr(loader, "workers_for", lambda _: workers)
        order = GlobalOrder(20, 8, 0)
        windows = training_windows(Numbers(), collate, order, range(2, 5), Slice(0, 1, 3), Loader())
        return [batch.tensors["x"].tolist() for window in windows for batch in window.micro_batches]

    assert numbers(2) == numbers(0)


def collate(samples: Any) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(samples)}
