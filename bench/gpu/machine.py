"""The part `doctor`: what the machine has, and whether NCCL (gloo), the compiler and NVML work on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.gpu.cases import Case
from bench.gpu.setting import Setting


def cases(setting: Setting) -> list[Case]:
    on_gpu = [] if setting.small else [Case("NVML", "machine:nvml", seconds=60)]
    return [
        Case("findings", "machine:findings", seconds=200),
        Case("ranks", "machine:ranks", seconds=130),
        Case("compiled", "machine:compiled", seconds=130),
        *on_gpu,
    ]


def findings(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    """Everything that `drivetrain doctor --json` prints."""
    from drivetrain.doctor.findings import examine

    del given, setting, folder
    return {"doctor": examine()}


def ranks(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    import torch

    from drivetrain.doctor.tries import joined

    del given, folder
    if setting.small:
        return _answered(joined("gloo", "cpu", 2))
    return _answered(joined("nccl", "cuda", torch.cuda.device_count()))


def compiled(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    from drivetrain.doctor.tries import compiled as compiles

    del given, folder
    return _answered(compiles(setting.device))


def nvml(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    from drivetrain.doctor.tries import managed

    del given, setting, folder
    return _answered(managed())


def _answered(answer: tuple[str, str]) -> dict[str, Any]:
    state, why = answer
    return {"why": why} if state == "yes" else {"missed": why}
