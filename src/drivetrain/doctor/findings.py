"""Examines what this machine can do with drivetrain, and why not."""

from __future__ import annotations

import contextlib
import importlib
import io
import shutil
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from drivetrain.config import rules
from drivetrain.config.engines import KINDS
from drivetrain.config.machine import Machine
from drivetrain.config.notices import emulation_notice
from drivetrain.config.packages import OPTIONAL, remedy
from drivetrain.config.precision import PRECISIONS
from drivetrain.doctor import devices, tries
from drivetrain.errors import last_line
from drivetrain.measure.gpu_software import device_software
from drivetrain.runtime import environment, extension_builds
from drivetrain.runtime.hardware import detect

_GLOO = "processes that share the cores (gloo)"
_ON_CPUS = {
    "deepspeed": f"{_GLOO}; torch's optimizers: nothing is compiled (no fused_adam.so), and no --deepspeed is needed",
    "accelerate": f"{_GLOO}; Accelerate has only ddp between CPUs; for fsdp and deepspeed it takes them for GPUs",
}


def examine() -> dict[str, Any]:
    """Returns JSON-able findings: machine, versions, precisions, packages, compilers, disk, and the results of tries on
    a GPU."""
    machine = detect()
    return {
        **environment.describe(machine),
        "software": device_software(machine),
        "tries": tries.tried(machine.device, machine.device_count),
        "devices": devices.table(),
        "precisions": {name: _precision(name, machine) for name in PRECISIONS},
        "engines": {name: _engine(name, machine) for name in KINDS},
        "optional": {package: _optional(package) for package in OPTIONAL},
        "compile": _compile(),
        "native_builds": left_builds(),
        "free_disk_bytes": shutil.disk_usage(".").free,
    }


def _precision(name: str, machine: Machine) -> tuple[str, str]:
    gaps = list(rules.precision_gap(name, machine))
    if gaps:
        return "no", gaps[0]
    notice = emulation_notice(PRECISIONS[name], machine)
    return ("emulated", notice) if notice else ("yes", "")


def _engine(name: str, machine: Machine) -> tuple[str, str]:
    if name == "single":
        return "yes", ""
    for package in KINDS[name](name=name).packages - (machine.packages or frozenset()):
        return "no", f"not installed: {remedy(package)}"
    if machine.device == "cpu":
        return ("emulated", "replicas on threads") if name == "dp" else ("yes", _ON_CPUS.get(name, _GLOO))
    found = f"{machine.device_count} GPU{'s' if machine.device_count > 1 else ''} here; "
    return "yes", found + "it was tested with CPU ranks, and never on several GPUs"


def left_builds() -> dict[str, tuple[str, str]]:
    """Returns remains of interrupted builds of native extensions, on which later starts would fail.

    drivetrain builds none for DeepSpeed (except for nvme, whose remains it deletes itself); other programs stop at
    them.
    """
    found = {}
    for folder in extension_builds.folders():
        if (folder / "lock").exists() and not extension_builds.is_building(folder, patience=60.0):
            why = "an interrupted build left a lock: the next start that needs it waits for ever"
            found[f"build of {folder.name}"] = ("no", f"{why}. rm -r {folder}")
        elif not (folder / "lock").exists() and not extension_builds.is_built(folder):
            why = f"half built: '{folder.name}.so: cannot open shared object file' comes from it"
            found[f"build of {folder.name}"] = ("no", f"{why}. rm -r {folder}")
    return found


def _optional(package: str) -> tuple[str, str]:
    purpose = OPTIONAL[package].purpose
    try:
        installed = version(package)
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed logs there, and findings may be asked for as JSON
            importlib.import_module(package)
    except PackageNotFoundError:
        return "no", f"not installed; for {purpose}: {remedy(package)}"
    except ImportError as error:
        return "no", f"installed but broken: {error}"
    except Exception as error:  # whatever the package's own code raises where it does not fit the others
        return "no", f"installed but broken: {last_line(error)}"
    return "yes", f"{installed}; for {purpose}"


def _compile() -> tuple[str, str]:
    compiler = next((found for found in ("c++", "g++", "clang++") if shutil.which(found)), None)
    if compiler is None:
        return "no", "torch.compile needs a C++ compiler; install g++"
    return "yes", f"uses {compiler}"
