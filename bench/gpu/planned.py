"""The part `plan`: what `drivetrain plan` says of runs on this device, beside what they take.

Twice: with the speeds that `drivetrain calibrate` measures here, and with the catalogue's alone, as of a device that is
not here. The plan is made before the run in the same process, which then trains as `drivetrain train` does.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.gpu.cases import Case
from bench.gpu.language import models_of
from bench.gpu.setting import Setting
from bench.gpu.speed import measured_memory, our_memory, our_steps, train_ours

LORA = {"adapter": {"method": "lora", "rank": 16}}
RUNS: dict[str, dict[str, Any]] = {
    "0.5B, pretrain, fp32": {"size": "0.5B", "task": "pretrain", "batch": 4, "run": {"precision": "fp32"}},
    "0.5B, pretrain, bf16-mixed": {"size": "0.5B", "task": "pretrain", "batch": 4, "run": {"precision": "bf16-mixed"}},
    "0.5B, pretrain, bf16-mixed, recomputed": {
        "size": "0.5B",
        "task": "pretrain",
        "batch": 4,
        "run": {"precision": "bf16-mixed", "recompute": True},
    },
    "0.5B, pretrain, bf16-mixed, fsdp": {
        "size": "0.5B",
        "task": "pretrain",
        "batch": 4,
        "run": {"precision": "bf16-mixed", "engine": "fsdp", "processes": 1},
    },
    "0.5B, sft, bf16-mixed": {"size": "0.5B", "task": "sft", "batch": 16, "run": {"precision": "bf16-mixed"}},
    "0.5B, sft, LoRA": {"size": "0.5B", "task": "sft", "batch": 16, "run": {"precision": "bf16-mixed", **LORA}},
    "1B, pretrain, bf16-mixed": {"size": "1B", "task": "pretrain", "batch": 4, "run": {"precision": "bf16-mixed"}},
    "1B, pretrain, bf16-master": {"size": "1B", "task": "pretrain", "batch": 4, "run": {"precision": "bf16-master"}},
}
TINY = {"size": "tiny", "task": "pretrain", "batch": 4, "run": {"precision": "fp32"}}
FIRST, LAST = 4, 12  # steps; those after the first are timed


def cases(setting: Setting) -> list[Case]:
    runs = {"tiny, pretrain, fp32": TINY} if setting.small else RUNS
    given = {name: {**run, **sizes(setting)} for name, run in runs.items()}
    models = {each["size"]: each for each in given.values()}
    return [
        *models_of([*models.values()]),
        Case("calibrate", "planned:calibrate", seconds=120),
        *(
            Case(name, "planned:compared", each, seconds=90, after=(f"model {each['size']}", "calibrate"))
            for name, each in given.items()
        ),
    ]


def sizes(setting: Setting) -> dict[str, int]:
    return {"length": 64 if setting.small else 1024, "first": FIRST, "last": LAST, "seed": 0}


def calibrate(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    from drivetrain.plan.calibrate import calibrated
    from drivetrain.plan.calibration import keep, kept_at
    from drivetrain.runtime.hardware import detect

    del given, folder
    machine = detect(setting.device)
    found = calibrated(machine, print)
    keep(found, kept_at(machine))
    return {"took_seconds": found.took_seconds, "calibration": json.loads(found.model_dump_json())}


def compared(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    """Peak bytes that were allocated and reserved, and seconds of a step: planned twice, and measured."""
    import run_files

    from bench.gpu.sides import our_run
    from drivetrain.plan.catalogue import catalogue
    from drivetrain.runtime.hardware import detect

    task: Any = import_module(f"bench.gpu.{given['task']}")
    data = task.write_data(given, setting, folder)
    run = our_run(given, setting, folder, data)
    file = run_files.write_run(folder / "planned.yaml", {**run, "output": str(folder / "planned")})
    known = catalogue().named_by_driver(detect(setting.device).device_name)
    machines = {"calibrated": "this machine", **({} if known is None else {"catalogue": f"1x{known[0]}"})}
    plans = {name: planned(file, machine) for name, machine in machines.items()}
    memory = measured_memory(setting.device)
    output = train_ours(run, folder)
    seconds, samples, _ = our_steps(output, given["first"], given["last"])
    found = memory() if setting.small else our_memory(output)
    return {"plans": plans, "seconds": seconds / (samples / given["batch"]), **found}


def planned(file: Path, machine: str) -> dict[str, Any]:
    """Returns bytes and seconds of a run's plan on a machine of the catalogue, or the one here."""
    from drivetrain.plan.as_asked import plan_as_asked
    from drivetrain.plan.estimate import Traced
    from drivetrain.plan.machines import cluster

    plan = plan_as_asked(file, [[]], Traced(cluster(machine)))
    [row] = plan.rows
    if row.costs is None:
        return {"failed": row.reason}
    memory = row.costs.memory
    return {
        "allocated": memory.allocated,
        "reserved": memory.reserved,
        "seconds": row.seconds,
        "bound_by": None if row.timing is None else row.timing.bound_by,
        "took_seconds": plan.seconds,
    }
