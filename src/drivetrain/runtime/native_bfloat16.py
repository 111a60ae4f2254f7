"""Finds out whether runs on this machine compute in bfloat16 by the device's own instructions, without PyTorch where no
GPU can be: to import it takes a second."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

CPU_FLAGS = Path("/proc/cpuinfo")
# oneDNN takes bfloat16 for supported on every processor with AVX-512, also where it has to compute the products by
# other instructions; so the flags of the instructions themselves are looked for
AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
X86 = ("avx512_bf16", "amx_bf16")
ARM = "bf16"
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # variables that forbid oneDNN a processor's newer instructions
TOO_LOW = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"})


def device_with_bfloat16(device: str = "auto") -> str | None:
    """Returns the device that a run takes here, "cpu" or "cuda", if it has instructions for products in bfloat16, else
    None. device: "auto", "cpu" or "cuda" as in the run file.

    A device that is returned has bfloat16 among the native dtypes of hardware.detect as well. Where the driver of a
    GPU is installed, detect itself is asked.
    """
    if device != "cpu" and _has_gpu_driver():
        from drivetrain.runtime.hardware import detect

        machine = detect(device)
        if machine.device == "cuda":
            return machine.device if "bfloat16" in machine.native_dtypes else None
    return "cpu" if cpu_has_bfloat16() else None


def cpu_has_bfloat16() -> bool | None:
    """Returns whether the processor's flags name instructions for products in bfloat16 that oneDNN may use; None where
    there are no flags to read (macOS, Windows)."""
    try:
        lines = CPU_FLAGS.read_text().splitlines()
    except OSError:
        return None
    named = (line.partition(":") for line in lines)
    flags = {flag for name, _, value in named if name.strip() in ("flags", "Features") for flag in value.split()}
    if not flags:
        return None
    if any(os.environ.get(name, "").upper() in TOO_LOW for name in LIMITS):
        return False
    return ARM in flags or (flags >= AVX512 and not flags.isdisjoint(X86))


def _has_gpu_driver() -> bool:
    """Returns whether a GPU may be there: NVIDIA's driver library loads (also under WSL and on Jetson, which have no
    /dev/nvidia0), or AMD's kernel driver runs."""
    if Path("/dev/kfd").exists():
        return True
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return True
    return False
