"""GPUs that do not answer every question, played by a stand-in for NVIDIA's library."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.measure.utilisation import UtilisationSampler, joined

WHOLE, PART = "1111", "2222"
CUDA = torch.device("cuda", 0)


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    pass


def refuse(*_: Any) -> Any:
    raise NotSupported


def library(**answers: Callable[..., Any]) -> ModuleType:
    """pynvml with one GPU at 40 %, some of whose answers are replaced."""

    def handle(uuid: str) -> str:
        if uuid != f"GPU-{WHOLE}":
            raise NVMLError
        return uuid

    usual: dict[str, Any] = {
        "NVMLError": NVMLError,
        "NVML_DEVICE_MIG_ENABLE": 1,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": handle,
        "nvmlDeviceGetMigMode": lambda _: [0, 0],
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=7),
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=40),
        "nvmlDeviceGetTotalEnergyConsumption": lambda _: 5000,
    }
    made = ModuleType("pynvml")
    for name, answer in {**usual, **answers}.items():
        setattr(made, name, answer)
    return made


def sampled(monkeypatch: pytest.MonkeyPatch, nvml: ModuleType, uuid: str = WHOLE) -> dict[str, Any]:
    """A tenth of a second's summary."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid))
    with UtilisationSampler(CUDA, every_seconds=0.02) as sampler:
        time.sleep(0.1)
    assert sampler.failure is None
    return sampler.summary()


def test_a_gpu_that_answers_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampled(monkeypatch, library())
    assert (found["mean"], found["peak"]) == (pytest.approx(0.4), 0.4)
    assert (found["device_memory_peak_bytes"], found["energy_joules"]) == (7, 0.0)


def test_a_gpu_without_memory_of_its_own_still_tells_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampled(monkeypatch, library(nvmlDeviceGetMemoryInfo=refuse, nvmlDeviceGetTotalEnergyConsumption=refuse))
    assert found["mean"] == pytest.approx(0.4)
    assert (found["device_memory_peak_bytes"], found["energy_joules"]) == (None, None)


def test_a_virtual_gpu_that_tells_no_load_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampled(monkeypatch, library(nvmlDeviceGetUtilizationRates=refuse))
    assert (found["mean"], found["peak"], found["series"]) == (None, None, [])
    assert found["device_memory_peak_bytes"] == 7


def test_of_a_part_of_a_gpu_nothing_of_the_whole_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampled(monkeypatch, library(nvmlDeviceGetMigMode=lambda _: [1, 1]))
    assert (found["mean"], found["device_memory_peak_bytes"], found["energy_joules"]) == (None, None, None)


def test_a_part_that_has_a_name_of_its_own_tells_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(uuid: str) -> str:
        if uuid != f"MIG-{PART}":
            raise NVMLError
        return uuid

    found = sampled(monkeypatch, library(nvmlDeviceGetHandleByUUID=handle), PART)
    assert (found["mean"], found["device_memory_peak_bytes"]) == (None, 7)


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_the_processors_load_is_not_taken_for_a_gpus(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampled(monkeypatch, library(**{broken: refuse}))
    assert (found["mean"], found["peak"], found["samples"]) == (None, None, 0)
    assert joined([found, found], shared=False)["mean"] is None


def test_a_library_that_breaks_down_ends_the_sampling_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> Any:
        raise OSError("driver gone")

    monkeypatch.setitem(sys.modules, "pynvml", library(nvmlDeviceGetUtilizationRates=broken))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=WHOLE))
    with UtilisationSampler(CUDA, every_seconds=0.02) as sampler:
        time.sleep(0.05)
    assert str(sampler.failure) == "driver gone"
    assert sampler.summary()["mean"] is None
