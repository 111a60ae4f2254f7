"""Describes what a result depends on beside the run file: versions, git commit, hardware."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from drivetrain.config.machine import Machine

PACKAGES = ("drivetrain", "torch", "transformers", "tokenizers", "safetensors", "torchmetrics", "numpy")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def describe(machine: Machine) -> dict[str, Any]:
    """Returns versions, git commit of the current folder, operating system and hardware, as JSON-able values."""
    return {
        "versions": versions(),
        "git": git_commit(),
        "platform": platform.platform(),
        "device": machine.device,
        "device_name": machine.device_name,
        "device_count": machine.device_count,
        "memory_bytes": machine.memory_bytes,
        "cpu_cores": machine.cpu_cores,
        "compute_capability": machine.compute_capability,
        "native_dtypes": sorted(machine.native_dtypes),
    }


def git_commit() -> dict[str, Any] | None:
    """Returns the commit of the current folder and whether it has changes; None outside git."""
    commit, status = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "changed": bool(status)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
