"""The catalogue of devices: its figures hang together, and a user's file is checked as a whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain.errors import UserError
from drivetrain.plan.catalogue import PCIE_GB_PER_SECOND, catalogue
from drivetrain.plan.machines import cluster
from drivetrain.runtime.hardware import detect

KNOWN = catalogue()
OWN = """
networks:
  ours: {title: our switch, gb_per_second: 12.5, adapters: node}
devices:
  X1:
    title: a card
    memory_mib: 1024
    memory_gb_per_second: 100
    tflops: {float32: 10}
    pcie: 4
    network: ours
"""


def test_the_memory_of_a_host_is_known_where_a_file_or_the_machine_here_says(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(OWN.replace("pcie: 4", "pcie: 4\n    host_memory_mib: 2048"))
    assert cluster("4xX1", catalogue(file)).host_memory == 2048 * 2**20
    unknown = cluster("8xH100")
    assert unknown.host_memory is None
    assert replace(unknown, is_here=True).host_memory == detect("cpu").memory_bytes


def problems(text: str, tmp_path: Path) -> dict[str, str]:
    """Returns field → why and what to do, of a user's file."""
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        catalogue(file)
    return {each.field.removeprefix(f"{file}: "): f"{each.why} {each.fix}" for each in refused.value.problems}


@pytest.mark.parametrize("name", KNOWN.devices)
def test_every_figure_of_a_device_has_a_source_with_an_address(name: str) -> None:
    device = KNOWN.devices[name]
    for field in ("memory_mib", "memory_gb_per_second", "tflops", "link", "matmul_efficiency"):
        assert KNOWN.sources[device.source_of(field)].url.startswith("https://")
    assert KNOWN.sources[KNOWN.networks[device.network].source].url.startswith("https://")


@pytest.mark.parametrize("name", KNOWN.devices)
def test_figures_of_a_device_are_of_one_order(name: str) -> None:
    """A figure with structured sparsity, in both directions or in other units is off by two or more."""
    device = KNOWN.devices[name]
    if "float8" in device.tflops:
        assert device.tflops["float8"] == pytest.approx(2 * device.tflops["bfloat16"], rel=0.03)
    if "bfloat16" in device.tflops:
        assert device.tflops["bfloat16"] == device.tflops["float16"]
    assert 7 <= device.tflops["float32"] < 200
    assert 200 < device.memory_gb_per_second < 10_000
    assert 15_000 < device.memory_mib < 300_000
    if device.link is not None:
        assert PCIE_GB_PER_SECOND[device.pcie] < device.link.gb_per_second < device.memory_gb_per_second
    if device.compute_capability is not None:
        assert ("bfloat16" in device.tflops) == (device.compute_capability >= (8, 0))


def test_no_two_devices_share_a_name() -> None:
    names = [name for name, device in KNOWN.devices.items() for name in (name, *device.aliases)]
    assert sorted(KNOWN.device(name)[0] for name in names) == sorted(
        name for name, device in KNOWN.devices.items() for _ in (name, *device.aliases)
    )


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIE-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla P40", "P40"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("AMD Instinct MI300X", "MI300X-192GB"),
    ],
)
def test_what_drivers_call_a_device_is_found(driver: str, name: str) -> None:
    found = KNOWN.named_by_driver(driver)
    assert found is not None
    assert found[0] == name


def test_a_users_device_joins_the_others(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(OWN)
    found = catalogue(tmp_path / "own.yaml")
    assert found.device("x1")[1].peak_flops("bfloat16") == 10e12, "a type that is not listed has float32's rate"
    assert found.network("ours").gb_per_second == 12.5
    assert found.device("H100")[0] == "H100-80GB"
    assert "X1" not in KNOWN.devices


def test_all_problems_of_a_users_file_come_at_once(tmp_path: Path) -> None:
    broken = OWN.replace("memory_mib: 1024", "memory_mb: 1024").replace("pcie: 4", "pcie: 9")
    found = problems(broken.replace("float32: 10", "float64: 10"), tmp_path)
    assert "is required" in found["devices.X1.memory_mib"]
    assert "did you mean memory_mib?" in found["devices.X1.memory_mb"]
    assert "9 was given" in found["devices.X1.pcie"]
    assert "devices.X1.tflops.float64" in found


def test_figures_that_cannot_be_are_refused(tmp_path: Path) -> None:
    text = OWN.replace("network: ours", "network: our\n    matmul_efficiency: {float32: 80}\n    sources: {speed: x}")
    found = problems(text.replace("float32: 10}", "bfloat16: 0}"), tmp_path)
    assert "did you mean ours?" in found["devices.X1.network"]
    assert "a share of the peak" in found["devices.X1.matmul_efficiency.float32"]
    assert "float32 is missing" in found["devices.X1.tflops"]
    assert "0 was given" in found["devices.X1.tflops.bfloat16"]
    assert "no such figure" in found["devices.X1.sources.speed"]


@pytest.mark.parametrize(
    "text", ["", "devices: 3", "- 1", "devices: {X1: }", "devices: {}", "divices: {}", "a: [", "\0"]
)
def test_a_file_of_another_form_is_refused(text: str, tmp_path: Path) -> None:
    assert problems(text, tmp_path)
