"""The device with instructions for bfloat16, from the processor's flags or from the GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drivetrain.config.notices import emulation_notice
from drivetrain.config.precision import PRECISIONS
from drivetrain.plan.machines import cluster
from drivetrain.runtime import hardware, native_bfloat16
from drivetrain.runtime.native_bfloat16 import device_with_bfloat16

AVX512 = "fma avx2 avx512f avx512dq avx512cd avx512bw avx512vl"
GPU = replace(cluster("8xH100-80GB").host, native_dtypes=frozenset({"float32", "float16", "bfloat16"}))


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_bfloat16, "_has_gpu_driver", lambda: False)
    for name in native_bfloat16.LIMITS:
        monkeypatch.delenv(name, raising=False)


def flags(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: bf16\n{line}\nbugs\t\t: spectre\n\n")
    monkeypatch.setattr(native_bfloat16, "CPU_FLAGS", folder / "cpuinfo")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        pytest.param(f"flags\t\t: {AVX512} avx512_bf16", "cpu", id="EPYC Genoa"),
        pytest.param(f"flags\t\t: {AVX512} avx512_bf16 amx_bf16 amx_tile", "cpu", id="Xeon Sapphire Rapids"),
        pytest.param(f"flags\t\t: {AVX512} avx512_vnni", None, id="Xeon Ice Lake"),
        pytest.param("flags\t\t: fma avx2", None, id="EPYC Milan"),
        pytest.param("Features\t: fp asimd bf16 i8mm", "cpu", id="Neoverse V1"),
        pytest.param("Features\t: fp asimd", None, id="Neoverse N1"),
    ],
)
def test_a_processors_flags_decide(
    line: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags(line, tmp_path, monkeypatch)
    assert device_with_bfloat16() == found
    assert device_with_bfloat16("cpu") == found


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        ("AVX2", None),
        ("avx512_core", None),
        ("AVX512_CORE_BF16", "cpu"),
        ("AVX512_CORE_AMX", "cpu"),
        ("DEFAULT", "cpu"),
    ],
)
def test_instructions_that_onednn_may_not_use_do_not_count(
    limit: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags(f"flags\t\t: {AVX512} avx512_bf16", tmp_path, monkeypatch)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert device_with_bfloat16() == found


def test_a_system_without_cpuinfo_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_bfloat16, "CPU_FLAGS", tmp_path / "absent")
    assert device_with_bfloat16() is None


@pytest.mark.parametrize(
    ("line", "onednn", "native"),
    [
        pytest.param(f"flags\t\t: {AVX512} avx512_vnni", True, False, id="oneDNN computes by other instructions"),
        pytest.param(f"flags\t\t: {AVX512} avx512_bf16", True, True, id="the processor's own instructions"),
        pytest.param(f"flags\t\t: {AVX512} avx512_bf16", False, False, id="a build of PyTorch that uses none"),
        pytest.param("cpu\t\t: POWER10", True, True, id="no flags listed, so oneDNN's answer stays"),
        pytest.param(None, True, True, id="no cpuinfo, so oneDNN's answer stays"),
    ],
)
def test_a_run_finds_bfloat16_native_where_the_flags_do_not_deny_it(
    line: str | None, onednn: bool, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    if line is None:
        monkeypatch.setattr(native_bfloat16, "CPU_FLAGS", tmp_path / "absent")
    else:
        flags(line, tmp_path, monkeypatch)
    machine = hardware.detect("cpu")
    assert ("bfloat16" in machine.native_dtypes) is native
    notice = emulation_notice(PRECISIONS["bf16-mixed"], machine)
    assert (notice is None) is native
    assert native or f"{machine.device_name} has no bfloat16 arithmetic: products are computed in fp32" in str(notice)


def test_this_processor_has_bfloat16_only_where_runs_find_it_native() -> None:
    assert device_with_bfloat16() is None or "bfloat16" in hardware.detect("cpu").native_dtypes


@pytest.mark.parametrize("on_the_cpu", [False, True])
def test_a_gpu_is_asked_itself_unless_the_run_stays_on_the_cpu(
    on_the_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags(f"flags\t\t: {AVX512}{' avx512_bf16' if on_the_cpu else ''}", tmp_path, monkeypatch)
    monkeypatch.setattr(native_bfloat16, "_has_gpu_driver", lambda: True)
    without = replace(GPU, native_dtypes=frozenset({"float32", "float16"}))
    no_gpu = replace(GPU, device="cpu", native_dtypes=frozenset({"float32", "bfloat16"}))
    cpu = "cpu" if on_the_cpu else None
    for machine, found in ((GPU, "cuda"), (without, None), (no_gpu, cpu)):
        monkeypatch.setattr(hardware, "detect", lambda _, machine=machine: machine)
        assert device_with_bfloat16() == found
        assert device_with_bfloat16("cpu") == cpu
