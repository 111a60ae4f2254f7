"""One side of the benches of images and texts: drivetrain, the plain loop of bench/plain_loop.py, or the Trainer."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from bench.gpu.setting import Setting
from bench.gpu.speed import Clock, measured_memory, our_memory, our_steps, peak_flops, train_ours

SIDES = {
    "ours, bf16-mixed": {"side": "ours"},
    "plain loop": {"side": "plain"},
    "trainer": {"side": "trainer"},
}


def trained(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    """Samples a second between two steps, share of the device's peak, peak memory, the last loss."""
    task: Any = import_module(f"bench.gpu.{given['task']}")
    data = task.make_data(given, setting)
    run = run_of(given, setting, task.workload(given, setting, data, folder / "cache"))
    found = {"ours": _ours, "plain": _plain, "trainer": _trainer}[given["side"]](given, setting, folder, run)
    rate = given["batch"] * (given["last"] - given["first"]) / found.pop("seconds")
    per_sample, peak = task.flops_per_sample(given, setting, data), peak_flops(setting.device_name)
    mfu = None if peak is None or per_sample is None else rate * per_sample / peak
    return {**found, "rate": rate, "unit": "samples", "mfu": mfu}


def run_of(given: dict[str, Any], setting: Setting, workload: dict[str, Any]) -> dict[str, Any]:
    """The run file, which the plain loop and the Trainer's side read too."""
    return {
        "workload": workload,
        "precision": "bf16-mixed",
        "device": setting.device,
        "seed": given["seed"],
        "batch_size": given["batch"],
        "loop": {"steps": given["last"], "max_grad_norm": 1.0},
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "evaluation": {"every_steps": 10 * given["last"]},
        "tracking": {"log_every": given["first"]},
    }


def _ours(given: dict[str, Any], setting: Setting, folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    memory = measured_memory(setting.device)
    output = train_ours(run, folder)
    seconds, _, losses = our_steps(output, given["first"], given["last"])
    return {"seconds": seconds, "loss": losses[-1], **(memory() if setting.small else our_memory(output))}


def _plain(given: dict[str, Any], setting: Setting, folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    import plain_loop
    import run_files
    import torch

    from drivetrain.launch.prepare import checked
    from drivetrain.numerics.torch_precision import arithmetic
    from drivetrain.runtime.hardware import detect

    config = checked(run_files.write_run(folder / "run.yaml", {**run, "output": str(folder / "run")})).run
    clock, memory = Clock(setting.device, given["first"], given["last"]), measured_memory(setting.device)

    class Turns(plain_loop.Turns):
        """In the place of those that alternate with another process."""

        def __init__(self) -> None:
            """No pipes are there."""

        def take(self, step: int) -> None:
            clock.step_done(step)

    with arithmetic(config.precision_spec, detect(setting.device)):
        losses = plain_loop.train(config, torch.device(setting.device), Turns())
    return {"seconds": clock.seconds, "loss": losses[given["last"]], **memory()}


def _trainer(given: dict[str, Any], setting: Setting, folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    import hf_trainer
    from transformers import Trainer, TrainingArguments

    from bench.gpu.sides import common_arguments, timed

    memory = measured_memory(setting.device)
    parts = hf_trainer.images(run["workload"]) if given["task"] == "images" else hf_trainer.texts(run["workload"])
    arguments = common_arguments(given, setting, folder) | {"learning_rate": 1e-4, "bf16": True}
    clock = Clock(setting.device, given["first"], given["last"])
    loss = timed(Trainer(args=TrainingArguments(**arguments), **parts), clock)
    return {"seconds": clock.seconds, "loss": loss, **memory()}
