"""Memory that runs out is recognised whichever library reports it, and an unfinished window leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drivetrain.errors import OutOfMemory, RunError, UserError
from drivetrain.memory import limit
from drivetrain.memory.limit import data_bytes, limited, safe_limit
from drivetrain.memory.shortage import Undo, is_shortage, room_for
from drivetrain.memory.statistics import Statistics

TOO_MUCH = 2**46  # bytes; no machine grants them


def test_torch_numpy_and_python_are_understood_when_they_say_that_memory_is_out() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as by_torch:
        torch.empty(TOO_MUCH, dtype=torch.uint8)
    with pytest.raises(MemoryError) as by_numpy:
        np.empty(TOO_MUCH * 8, np.uint8)
    with pytest.raises(MemoryError) as by_python:
        bytearray(TOO_MUCH * 8)
    assert all(is_shortage(raised.value) for raised in (by_torch, by_numpy, by_python))
    assert is_shortage(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_shortage(RuntimeError("could not create a primitive")), "oneDNN, where its code has no room"


ANOTHER = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RuntimeError("could not create a primitive descriptor for the matmul primitive"),
    OSError(28, "no space"),
]


@pytest.mark.parametrize("error", ANOTHER)
def test_another_error_is_not_taken_for_it(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, room_for("a step", 4):
        raise error
    assert raised.value is error


def test_what_ran_out_is_reported_with_what_to_try() -> None:
    words = r"out of memory in micro-batches of 4 \(.*\): try recompute"
    with pytest.raises(OutOfMemory, match=words) as raised, room_for("micro-batches of 4", 4):
        torch.empty(TOO_MUCH, dtype=torch.uint8)
    assert raised.value.samples == 4


LIMITED = """
import torch
from drivetrain.memory import limit
from drivetrain.memory.limit import data_bytes, limited
from drivetrain.memory.shortage import is_shortage

with limited(data_bytes() + 256 * 2**20, "cpu"):
    assert torch.ones(2**20).sum() == 2**20
    try:
        torch.empty(2**29, dtype=torch.uint8)
    except (RuntimeError, MemoryError) as error:
        assert is_shortage(error), error
    else:
        raise AssertionError("512 MiB were granted")
assert torch.empty(2**29, dtype=torch.uint8).numel() == 2**29
"""


def test_a_limit_on_a_cpu_makes_larger_allocations_fail_and_ends_with_its_block() -> None:
    """In a process of its own: this one may have freed as much, and be given it again."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_limit_below_what_the_process_has_already_is_refused() -> None:
    words = r"memory_limit: a process may take 10 MiB; it takes \d+ before it begins"
    with pytest.raises(UserError, match=words), limited(10 * 2**20, "cpu"):
        pass


def test_processes_share_what_is_free() -> None:
    one, four = safe_limit(1) - data_bytes(), safe_limit(4) - data_bytes()
    assert one > 2**27
    assert four == pytest.approx(one / 4, rel=0.1)


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def test_gradients_and_batch_statistics_are_as_before_the_window() -> None:
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(6, 4))  # statistics are no longer those of the start
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    statistics = Statistics(model)
    undo = Undo(model, optimizer, statistics)
    for _ in range(2):
        undo.mark()
        statistics.keep()
        model(torch.randn(6, 4)).sum().backward()
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])
        undo()
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
        assert all(p.grad is None for p in model.parameters())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)  # type: ignore[no-any-return]


def test_a_buffer_of_another_kind_that_forward_changes_is_named_and_nothing_is_tried_again() -> None:
    model = Counting()
    undo = Undo(model, torch.optim.SGD(model.parameters(), 0.1), Statistics(model))
    undo.mark()
    model(torch.randn(6, 4))
    with pytest.raises(RunError, match="forward changes calls"):
        undo()


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, []),
        ({"memory.max": "max\n", "memory.current": "5\n"}, []),
        ({"memory.max": "9000\n", "memory.current": "2000\n"}, [7000]),
        ({"memory.limit_in_bytes": "9000\n", "memory.usage_in_bytes": "1000\n"}, [8000]),
    ],
)
def test_a_containers_limit_counts_where_it_has_one(
    files: dict[str, str], left: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(limit, "Path", lambda _, name: tmp_path / name)
    assert limit._cgroup_left() == left
