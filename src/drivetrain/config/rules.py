"""The one place that answers "does this combination work on this machine?", free of torch.

`check` returns what cannot work, `notices` what works but should be known before starting. Both look at the run and a
`Machine` value, so that they answer as well for a machine that is only asked about.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from drivetrain.config.machine import Machine
from drivetrain.config.precision import Precision
from drivetrain.config.run import RunConfig
from drivetrain.config.workload import ImageClassification, TextClassification, UserModule
from drivetrain.errors import Problem


def check(run: RunConfig, machine: Machine) -> list[Problem]:
    """Every reason why this run cannot work on this machine."""
    of_the_run = [found for rule in (_batch, _length, _model, _paths) for found in rule(run)]
    of_the_machine = [found for rule in (_device, _precision) for found in rule(run, machine)]
    return of_the_run + of_the_machine


def notices(run: RunConfig, machine: Machine) -> list[str]:
    """What works but should be known: settings without effect, precisions the device only emulates."""
    emulation = emulation_notice(run.precision_spec, machine)
    return [*_without_effect(run), *_underflow(run), *([emulation] if emulation else [])]


# --- what cannot work ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """What a precision asks of the device beyond arithmetic, which a CPU can always emulate."""

    devices: tuple[str, ...]
    compute_capability: tuple[int, int] = (0, 0)


PRECISION_NEEDS: dict[str, Need] = {
    "fp32": Need(("cpu", "cuda")),
    "tf32": Need(("cuda",), (8, 0)),
    "fp16": Need(("cpu", "cuda"), (5, 3)),
    "bf16": Need(("cpu", "cuda"), (8, 0)),
    "fp16-mixed": Need(("cpu", "cuda"), (5, 3)),
    "bf16-mixed": Need(("cpu", "cuda"), (8, 0)),
}


def _device(run: RunConfig, machine: Machine) -> Iterator[Problem]:
    if run.device == "cuda" and machine.device != "cuda":
        yield Problem(
            "device", "cuda was given, but PyTorch sees no GPU here", "leave it out, or see what drivetrain doctor says"
        )


def _precision(run: RunConfig, machine: Machine) -> Iterator[Problem]:
    works = ", ".join(name for name in PRECISION_NEEDS if not list(precision_gap(name, machine)))
    for gap in precision_gap(run.precision, machine):
        yield Problem("precision", f"{run.precision} was given, but {gap}", f"works here: {works}")


def precision_gap(name: str, machine: Machine) -> Iterator[str]:
    """What the machine lacks for a precision."""
    need = PRECISION_NEEDS[name]
    if machine.device not in need.devices:
        yield f"it exists on {' and '.join(need.devices)} only and this is {machine.device_name}"
    elif machine.compute_capability is not None and machine.compute_capability < need.compute_capability:
        have, ask = (".".join(map(str, c)) for c in (machine.compute_capability, need.compute_capability))
        yield f"{machine.device_name} has compute capability {have}; it needs {ask}"


def _batch(run: RunConfig) -> Iterator[Problem]:
    if (run.batch_size is None) == (run.batch_size_per_device is None):
        given = "neither was given" if run.batch_size is None else "both were given"
        yield Problem("batch_size", f"of batch_size and batch_size_per_device {given}", "give one of the two")


def _length(run: RunConfig) -> Iterator[Problem]:
    if (run.loop.epochs is None) == (run.loop.steps is None):
        given = "neither was given" if run.loop.epochs is None else "both were given"
        yield Problem("loop", f"of epochs and steps {given}", "give one of the two")
    if run.schedule.warmup_steps and run.schedule.warmup_ratio:
        yield Problem("schedule", "warmup_steps and warmup_ratio were both given", "give one of the two")
    if run.loop.steps is not None and run.schedule.warmup_steps > run.loop.steps:
        yield Problem(
            "schedule.warmup_steps",
            f"warmup_steps ({run.schedule.warmup_steps}) > loop.steps ({run.loop.steps})",
            "warm up over fewer steps",
        )


def _model(run: RunConfig) -> Iterator[Problem]:
    if isinstance(run.workload, UserModule):
        return
    model = run.workload.model
    if (model.path is None) == (model.config is None):
        given = "neither was given" if model.path is None else "both were given"
        yield Problem(
            "workload.model",
            f"of path and config {given}",
            "give path (a folder or hub id) to start from weights, or config to start from scratch",
        )
    elif model.config is not None and "model_type" not in model.config:
        yield Problem("workload.model.config", "names no model_type", "add e.g. model_type: resnet")
    if isinstance(run.workload, TextClassification) and run.workload.model.path is None and not model_tokenizer(run):
        yield Problem(
            "workload.model.tokenizer",
            "is required when the model is made from a config",
            "give a tokenizer folder, a vocab.txt or a hub id",
        )


def model_tokenizer(run: RunConfig) -> str | None:
    assert isinstance(run.workload, TextClassification)
    return run.workload.model.tokenizer or run.workload.model.path


def _paths(run: RunConfig) -> Iterator[Problem]:
    """Files that must be there. A hub id looks like a relative path, so only what cannot be one is refused here."""
    if isinstance(run.workload, UserModule):
        yield from _missing("workload.path", run.workload.path)
        return
    data = run.workload.data
    is_hub = isinstance(run.workload, ImageClassification) and run.workload.data.source == "hub"
    if isinstance(run.workload, ImageClassification):
        source = run.workload.data.source
        if source == "digits" and (data.train is not None or data.evaluation is not None):
            yield Problem(
                "workload.data.train", "digits are bundled and take no path", "leave train and evaluation out"
            )
            return
        if source != "digits" and data.train is None:
            yield Problem("workload.data.train", f"is required for source {source}", "give a folder, file or hub id")
    for field, path in (("train", data.train), ("evaluation", data.evaluation)):
        if path is not None and not is_hub and not looks_like_hub_id(path):
            yield from _missing(f"workload.data.{field}", Path(path))


def looks_like_hub_id(path: str) -> bool:
    """`name` or `owner/name` without a file ending; a local path of that form wins where it exists."""
    given = Path(path)
    return not given.exists() and not given.is_absolute() and len(given.parts) == 2 and "." not in given.name


def _missing(field: str, path: Path) -> Iterator[Problem]:
    if not path.exists():
        yield Problem(field, f"{path} does not exist", f"paths are taken from the current folder, {Path.cwd()}")


# --- what works, but should be known ---------------------------------------------------------------------------------


def _without_effect(run: RunConfig) -> Iterator[str]:
    """Settings that are not their defaults and that nothing reads. (A resolved run file spells out all defaults.)"""
    optimizer = run.optimizer.name
    checks = (
        ("scaler", not run.precision_spec.scaled, "only fp16-mixed scales the loss"),
        ("optimizer.momentum", optimizer != "sgd", "only sgd reads it"),
        ("optimizer.betas", optimizer == "sgd", "sgd has none"),
        ("optimizer.eps", optimizer == "sgd", "sgd has none"),
        ("schedule.final_lr_ratio", run.schedule.name == "constant", "constant stays"),
        ("evaluation.every_epochs", run.evaluation.every_steps is not None, "every_steps was given and decides"),
        ("loader.prefetch", not run.loader.workers, "there are no workers"),
        ("micro_batch_size", _whole_batch(run), "it is not smaller than the batch"),
        ("workload.data.evaluation_fraction", _has_evaluation_data(run), "evaluation data were given"),
    )
    for field, unread, why in checks:
        if unread and not _is_default(run, field):
            yield f"{field} has no effect: {why}"


def _is_default(run: RunConfig, field: str) -> bool:
    *blocks, name = field.split(".")
    block: BaseModel = functools.reduce(getattr, blocks, run)
    return bool(getattr(block, name) == type(block).model_fields[name].get_default(call_default_factory=True))


def _has_evaluation_data(run: RunConfig) -> bool:
    return not isinstance(run.workload, UserModule) and run.workload.data.evaluation is not None


def _whole_batch(run: RunConfig) -> bool:
    batch = run.batch_size or run.batch_size_per_device
    return run.micro_batch_size is not None and batch is not None and run.micro_batch_size >= batch


SMALLEST_FP16 = 2.0**-24  # the smallest positive fp16 number


def _underflow(run: RunConfig) -> Iterator[str]:
    in_fp16 = run.precision_spec.parameters == "float16" and run.optimizer.name in {"adam", "adamw"}
    if in_fp16 and run.optimizer.eps < SMALLEST_FP16:
        yield (
            f"optimizer.eps={run.optimizer.eps:g} is 0 in fp16: a parameter whose gradient is 0 becomes NaN. Give "
            "at least 1e-7, or take fp16-mixed"
        )


def emulation_notice(precision: Precision, machine: Machine) -> str | None:
    """Said wherever 16-bit products are computed by the fp32 kernels."""
    if machine.device != "cpu" or precision.compute in machine.native_dtypes:
        return None
    return (
        f"{machine.device_name} has no {precision.compute} arithmetic: products are computed in fp32 from rounded "
        "inputs and rounded back (emulated). Accuracy is what such hardware gives; time and memory are not"
    )
