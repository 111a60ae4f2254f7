"""Peak memory, against hand arithmetic and against the profiler's allocator events."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from drivetrain.measure.memory import RecentMemory, TensorPeak, peaks, reset_peaks
from tests.device import chosen_device
from tests.ranks import RankPool

CPU = torch.device("cpu")
MEBIBYTE = 2**20


@pytest.mark.usefixtures("on_device")
def test_the_peak_of_plain_tensors_is_their_bytes() -> None:
    with TensorPeak(chosen_device()) as peak:
        one = torch.zeros(1000, 1000)
        two = one + 1
        del one
        three = two * 2
        del two, three
    assert peak.peak_bytes == 2 * 4_000_000


@pytest.mark.usefixtures("on_device")
def test_views_and_in_place_results_count_once() -> None:
    with TensorPeak(chosen_device()) as peak:
        tensor = torch.zeros(1000, 1000)
        tensor.view(-1)[::2].add_(1)
        tensor.t().mul_(2)
    assert peak.peak_bytes == 4_000_000


@pytest.mark.usefixtures("on_device")
def test_tensors_that_were_there_before_count_from_the_start() -> None:
    before = torch.zeros(500_000)
    with TensorPeak(chosen_device()) as peak:
        peak.track([before])
        assert peak.peak_bytes == 2_000_000
        before + 1
    assert peak.peak_bytes == 4_000_000


@pytest.mark.usefixtures("on_device")
def test_a_linear_layer_peaks_as_counted_by_hand() -> None:
    batch, width = 256, 512
    layer = nn.Linear(width, width, bias=False)
    inputs = torch.ones(batch, width)
    with TensorPeak(chosen_device()) as peak:
        peak.track([*layer.parameters(), inputs])
        outputs = layer(inputs)
        outputs.sum().backward()
    weight, activation = 4 * width * width, 4 * batch * width
    # at the peak live: weight, inputs, outputs, the weight's gradient; the outputs' gradient is one expanded number
    assert peak.peak_bytes == pytest.approx(2 * weight + 2 * activation, rel=0.01)


def profiled_peak(work: Callable[[], None]) -> int:
    """Peak growth by the profiler's allocator events."""
    only_cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=only_cpu, profile_memory=True, acc_events=True) as profile:
        work()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return int(np.max(np.cumsum(sizes)))


def test_a_training_step_peaks_as_the_allocator_says() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Dropout(0.1), nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(512, 256)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    theirs = profiled_peak(step)
    held = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    with TensorPeak(chosen_device()) as peak:
        peak.track([*held, inputs])
        start = peak.peak_bytes
        step()
    assert peak.peak_bytes - start == pytest.approx(theirs, rel=0.02)


@pytest.mark.usefixtures("on_device")
def test_recompute_lowers_the_measured_peak() -> None:
    from drivetrain.memory.recompute import apply_recompute

    def measured(recompute: bool) -> int:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)))
        if recompute:
            apply_recompute(model)
        with TensorPeak(chosen_device()) as peak:
            peak.track(model.parameters())
            model(torch.zeros(1024, 64)).sum().backward()
        return peak.peak_bytes

    assert measured(recompute=True) < 0.6 * measured(recompute=False)


def peak_over_shards() -> tuple[int, int]:
    """Of one more tensor the size of a shard, made by an operator and in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    shard = torch.zeros(500, 1000)
    whole = DTensor.from_local(shard, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
    with TensorPeak() as peak:
        peak.track([shard])
        before = peak.peak_bytes
        more = whole * 2
        whole.add_(more)
        torch._foreach_mul_([whole], 2.0)
    return before, peak.peak_bytes


def test_a_sharded_tensor_counts_as_the_shard_that_this_rank_holds(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(peak_over_shards) == [(2_000_000, 4_000_000)] * 2


def test_a_quantised_moment_counts_as_its_codes_and_scales_and_what_it_is_made_into() -> None:
    state: Any = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit
    moment = state.zeros((1000, 1024))
    with TensorPeak() as peak:
        peak.track([moment.codes, moment.scale, moment.qmap])
        held = peak.peak_bytes
        numbers = moment.dequantize()
    assert held == 1_024_000 + 4 * 4_000 + 4 * 256
    assert held + 2 * numbers.nbytes <= peak.peak_bytes < held + 4 * numbers.nbytes, "indices, values, scaled values"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the resident peak can be reset on Linux only")
def test_the_resident_peak_is_of_the_time_since_the_reset() -> None:
    def touch() -> None:
        with mmap.mmap(-1, 64 * MEBIBYTE) as memory:  # fresh pages, whatever malloc has kept
            for page in range(0, len(memory), mmap.PAGESIZE):
                memory[page] = 1

    touch()
    reset_peaks(CPU)
    small = peaks(CPU)["resident"]
    touch()
    grown = peaks(CPU)["resident"]
    assert 60 * MEBIBYTE < grown - small < 90 * MEBIBYTE


def test_looks_at_a_gpus_memory_each_begin_a_peak_and_leave_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's counters as PyTorch documents them: a reset sets the peak to what is in use."""
    in_use, peak = 10, 10

    def hold(bytes_: int) -> None:
        nonlocal in_use, peak
        in_use = bytes_
        peak = max(peak, in_use)

    def reset(_: torch.device) -> None:
        nonlocal peak
        peak = in_use

    def statistics(_: torch.device) -> dict[str, int]:
        return {"allocated_bytes.all.peak": peak, "reserved_bytes.all.peak": 2 * peak}

    monkeypatch.setattr("torch.cuda.memory_stats", statistics)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", reset)
    memory = RecentMemory(torch.device("cuda", 0))
    hold(70)
    hold(30)
    assert memory.look() == {"allocated": 70, "reserved": 140}
    hold(50)
    hold(20)
    assert memory.look() == {"allocated": 50, "reserved": 100}
    assert memory.peaks() == {"allocated": 70, "reserved": 140}
    hold(90)
    assert memory.peaks() == {"allocated": 90, "reserved": 180}


def test_on_a_cpu_a_look_is_what_is_resident_now() -> None:
    now = psutil.Process().memory_info().rss
    assert RecentMemory(CPU).look()["resident"] == pytest.approx(now, rel=0.2)
