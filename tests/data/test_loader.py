"""Windows and evaluation batches: which samples, in which pieces, however many workers load them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain.config.training import Loader
from drivetrain.data.loaded_together import LoadedTogether
from drivetrain.data.loader import MicroBatch, Window, evaluation_batches, training_windows
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.errors import RunError, problem
from drivetrain.runtime.hardware import usable_cores


class Numbers:
    """Sample i of epoch e is 1000 e + i."""

    def __init__(self, num_samples: int, broken: int | None = None) -> None:
        self._num_samples, self._broken = num_samples, broken

    def __len__(self) -> int:
        return self._num_samples

    def load(self, index: int, epoch: int) -> int:
        if index == self._broken:
            raise ValueError(f"sample {index} is broken")
        return 1000 * epoch + index


class Refusing(Numbers):
    def load(self, index: int, epoch: int) -> int:
        if index in (3, 7):
            raise problem("workload.data.train", f"a.jsonl line {index + 1}: no reply", "mend the row")
        return super().load(index, epoch)


class Together(Numbers, LoadedTogether):
    """Numbers that come a batch at a time, up to a place from which on they do not."""

    def load(self, index: int, epoch: int) -> int:
        assert index >= 12
        return super().load(index, epoch)

    def load_together(self, indices: Sequence[int]) -> tuple[int, ...] | None:
        return tuple(Numbers(self._num_samples).load(index, 0) for index in indices) if max(indices) < 12 else None


def collate(samples: Sequence[Any]) -> dict[str, Tensor]:
    return {"numbers": torch.tensor(samples)}


def windows(steps: range, micro: int = 4, workers: int = 0, rank: int = 0, world: int = 1) -> list[Window]:
    order = GlobalOrder(23, 10, seed=1)
    mine = Slice(rank, world, micro)
    return list(training_windows(Numbers(23), collate, order, steps, mine, Loader(workers=workers)))


def numbers(window: Window) -> list[int]:
    return [int(n) for batch in window.micro_batches if batch.counts for n in batch.tensors["numbers"]]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", [1, 20, 23, 30])
def test_ranks_evaluate_equally_many_batches_and_count_each_sample_once(samples: int, world: int) -> None:
    def dealt(rank: int) -> list[MicroBatch]:
        return list(evaluation_batches(Numbers(samples), collate, 10, Loader(), rank, world))

    ranks = [dealt(rank) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    counted = [batch.tensors["numbers"].tolist() for batches in ranks for batch in batches if batch.counts]
    assert sorted(number for batch in counted for number in batch) == list(range(samples))
    fillers = [batch for batches in ranks for batch in batches if not batch.counts]
    assert len(fillers) == -len(counted) % world
    assert all(batch.tensors["numbers"].numel() for batch in fillers), "a rank in step with others needs samples"


def test_a_window_holds_its_steps_samples_in_bounded_pieces() -> None:
    order = GlobalOrder(23, 10, seed=1)
    for window in windows(range(9)):
        epoch, indices = order.batch(window.step)
        assert window.epoch == epoch
        assert numbers(window) == [1000 * epoch + i for i in indices]
        assert all(len(batch.tensors["numbers"]) <= 4 for batch in window.micro_batches)


def test_workers_and_where_a_run_starts_change_nothing() -> None:
    whole = list(map(numbers, windows(range(9))))
    assert list(map(numbers, windows(range(5, 9)))) == whole[5:]
    assert list(map(numbers, windows(range(9), workers=2))) == whole


def test_torch_repeats_no_warning_of_more_workers_than_cores() -> None:
    with pytest.warns(UserWarning, match="will create 99 worker"):
        DataLoader(Numbers(2), num_workers=99)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(windows(range(2), workers=usable_cores() + 1)) == 2
    assert not caught


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_refused_while_loading_stops_the_run_and_names_each_row_from_a_worker_too(workers: int) -> None:
    loading = evaluation_batches(Refusing(23), collate, 8, Loader(workers=workers))
    with pytest.raises(RunError, match=r"train: a\.jsonl line 4: no reply\n.*\n.*train: a\.jsonl line 8: no reply\n"):
        next(loading)


def test_a_signal_to_the_whole_group_leaves_the_workers_to_the_run() -> None:
    order, mine = GlobalOrder(23, 10, seed=1), Slice(0, 1, 4)
    others = psutil.Process().children()  # ranks of other tests
    running = training_windows(Numbers(23), collate, order, range(40), mine, Loader(workers=1, prefetch=1))
    found = [numbers(next(running))]
    workers = [child for child in psutil.Process().children() if child not in others]
    assert workers
    for name in ("INT", "TERM"):  # by a process that is not their parent
        subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in workers)], check=True)
    assert [*found, *map(numbers, running)] == list(map(numbers, windows(range(40))))


def test_a_crash_that_keeps_the_batches_alive_does_not_wait_for_workers_for_ever() -> None:
    script = (
        "from tests.data.test_loader import *\n"
        "order, mine = GlobalOrder(23, 10, seed=1), Slice(0, 1, 4)\n"
        "running = training_windows(Numbers(23), collate, order, range(40), mine, Loader(workers=2))\n"
        "next(running)\n"
        "raise RuntimeError('a crash in the middle')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("a crash in the middle")


def test_ranks_together_take_the_global_batch() -> None:
    whole = windows(range(9))
    parts = [windows(range(9), rank=rank, world=3) for rank in range(3)]
    for step, window in enumerate(whole):
        assert sorted(numbers(window)) == sorted(n for part in parts for n in numbers(part[step]))


def test_the_loader_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    windows(range(4))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_takes_every_sample_once_in_order(workers: int) -> None:
    batches = list(evaluation_batches(Numbers(23), collate, 10, Loader(workers=workers)))
    assert [len(batch.tensors["numbers"]) for batch in batches] == [10, 10, 3]
    assert [int(n) for batch in batches for n in batch.tensors["numbers"]] == list(range(23))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_loaded_says_so(workers: int) -> None:
    with pytest.raises(ValueError, match="sample 7 is broken"):
        list(evaluation_batches(Numbers(23, broken=7), collate, 10, Loader(workers=workers)))


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_come_together_make_the_same_batches(workers: int) -> None:
    one_by_one, together = (
        [batch.tensors for batch in evaluation_batches(samples, collate, 4, Loader(workers=workers))]
        for samples in (Numbers(23), Together(23))
    )
    assert len(one_by_one) == len(together) == 6
    for wanted, found in zip(one_by_one, together, strict=True):
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)
