"""This machine as the rules' `Machine` value, and the device that a run uses."""

from __future__ import annotations

import os
import platform
import re
import socket
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from drivetrain.config.machine import Machine
from drivetrain.config.packages import installed
from drivetrain.runtime.native_bfloat16 import cpu_has_bfloat16


def detect(device: str = "auto") -> Machine:
    """Look at this machine. device: "auto", "cpu" or "cuda" as in the run file; a GPU that is not there is no error
    here, the rules report it."""
    machine = _cuda() if device != "cpu" and torch.cuda.is_available() else _cpu()
    return replace(
        machine, packages=installed(), unused=_unused() if (device, machine.device) == ("auto", "cpu") else None
    )


def _unused() -> str | None:
    """Returns the name of a GPU that a run leaves alone, because no engine supports its kind."""
    if torch.xpu.is_available():
        return f"{torch.xpu.get_device_name()} (Intel's XPU)"
    return "Apple's GPU (MPS)" if torch.backends.mps.is_available() else None


def torch_device(machine: Machine) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if machine.device == "cuda" else torch.device("cpu")


def usable_cores() -> int:
    """Returns the cores this process may run on (its affinity; a container's CPU quota is not seen)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def interfaces() -> dict[str, str]:
    """Returns the network interfaces of this machine, each with its IPv4 address."""
    found = {
        name: [a.address for a in all_ if a.family == socket.AF_INET] for name, all_ in psutil.net_if_addrs().items()
    }
    return {name: addresses[0] for name, addresses in found.items() if addresses}


def loopback() -> str | None:
    """Returns the name of the network interface that holds 127.0.0.1."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return None


def _cuda() -> Machine:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # ROCm's torch numbers AMD's generations by itself: gfx90a is 9.0, and is no Hopper
    capability = (properties.major, properties.minor) if torch.version.hip is None else None
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    native = {"float32", "float16"} | ({"bfloat16"} if has_bf16 else set())
    return Machine(
        device="cuda",
        device_name=properties.name,
        device_count=torch.cuda.device_count(),
        memory_bytes=properties.total_memory,
        cpu_cores=usable_cores(),
        compute_capability=capability,
        native_dtypes=frozenset(native),
    )


def _cpu() -> Machine:
    native = {"float32"}
    # oneDNN's own answer: whether it has kernels for this CPU's instructions (AVX-512 BF16/FP16, AMX, Arm BF16). Its
    # kernels for AVX-512 without BF16 take 4 times as long as fp32's, so the processor's flags have to agree
    if torch.ops.mkldnn._is_mkldnn_bf16_supported() and cpu_has_bfloat16() is not False:
        native.add("bfloat16")
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        native.add("float16")
    return Machine(
        device="cpu",
        device_name=cpu_name(),
        device_count=1,
        memory_bytes=psutil.virtual_memory().total,
        cpu_cores=usable_cores(),
        compute_capability=None,
        native_dtypes=frozenset(native),
    )


def cpu_name() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()
