"""This machine as the rules see it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest
import torch

from drivetrain.config.load import validate
from drivetrain.config.notices import notices
from drivetrain.runtime.hardware import detect, torch_device, usable_cores


def test_a_cpu_is_described_by_what_a_process_may_use() -> None:
    machine = detect("cpu")
    assert (machine.device, machine.device_count, machine.compute_capability) == ("cpu", 1, None)
    assert machine.device_name
    assert 0 < machine.memory_bytes <= psutil.virtual_memory().total
    assert 1 <= machine.cpu_cores <= (os.cpu_count() or 1)
    assert "float32" in machine.native_dtypes
    assert torch_device(machine) == torch.device("cpu")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_cores_are_those_of_the_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_auto_takes_the_cpu_where_there_is_no_gpu() -> None:
    assert detect("auto") == detect("cuda") == detect("cpu")


@pytest.mark.parametrize(("kind", "name"), [("xpu", "an Arc (Intel's XPU)"), ("mps", "Apple's GPU (MPS)")])
def test_a_gpu_that_no_run_takes_is_reported(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda: "an Arc")
    monkeypatch.setattr({"xpu": torch.xpu, "mps": torch.backends.mps}[kind], "is_available", lambda: True)
    run, _ = validate({"workload": {"type": "module", "path": "x.py"}, "batch_size": 4, "loop": {"steps": 1}}, [])
    assert run is not None
    assert detect("cpu").unused is None, "a run that was given the CPU expects no GPU"
    assert f"{name} is not used: this run takes the CPU" in notices(run, detect("auto"))


@pytest.mark.parametrize(("hip", "major", "capability"), [(None, 7, (7, 0)), (None, 9, (9, 0)), ("7.0", 9, None)])
def test_amds_generations_are_no_compute_capabilities(
    hip: str | None, major: int, capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(major=major, minor=0, name="a GPU", total_memory=2**34)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    machine = detect("cuda")
    assert machine.compute_capability == capability
    assert ("bfloat16" in machine.native_dtypes) == (hip is not None or major >= 8)
