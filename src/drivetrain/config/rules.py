"""The one place that answers "does this combination work on this machine?", free of torch.

It reads the run and a `Machine` value, so that it also answers for a machine other than this one. (`notices` has
remarks on runs that work.)
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.config.adapter import adapter_problems
from drivetrain.config.engine_rules import engine_problems, engine_problems_here
from drivetrain.config.language import LanguageData, LanguageModel
from drivetrain.config.machine import Machine
from drivetrain.config.numerics import numerics_problems
from drivetrain.config.packages import package_problems
from drivetrain.config.precision import PRECISIONS
from drivetrain.config.quantisation_aware import quantisation_aware_problems
from drivetrain.config.quantised import quantised_base_problems
from drivetrain.config.resolve import resolved, why_padded
from drivetrain.config.restarts import restart_problems
from drivetrain.config.run import RunConfig
from drivetrain.config.workload import ImageClassification, ImageData, OwnCode, TextClassification, TextData, UserModule
from drivetrain.errors import Problem


@dataclass(frozen=True)
class MissingPath(Problem):
    """A file or folder of the run file that this machine does not have; another one may."""

    path: Path


def check(run: RunConfig, machine: Machine) -> list[Problem]:
    """Returns every reason why this run cannot work on this machine."""
    of_the_machine = (_device, _precision, _processes, engine_problems_here, package_problems)
    return check_anywhere(run) + [problem for rule in of_the_machine for problem in rule(run, machine)]


def check_anywhere(run: RunConfig) -> list[Problem]:
    """Returns the reasons that hold on every machine."""
    of_the_run = (
        *(_batch, engine_problems, restart_problems, _length),
        *(_model, _loss, _unpadded, _stream, _adapter, _quantisation, _paths),
    )
    return [problem for rule in of_the_run for problem in rule(run)]


def judged(run: RunConfig, found: Sequence[Problem], machine: Machine) -> tuple[RunConfig, list[Problem]]:
    """Returns the run with its open fields filled in for this machine, and all problems, at most one a field."""
    told = {problem.field for problem in found}  # a field that was taken out is not reported missing too
    run = resolved(run, machine)
    return run, [*found, *(problem for problem in check(run, machine) if problem.field not in told)]


# --- what cannot work ----------------------------------------------------------------------------------------------


def _device(run: RunConfig, machine: Machine) -> Iterator[Problem]:
    if run.device == "cuda" and machine.device != "cuda":
        yield Problem(
            "device", "cuda was given, but PyTorch sees no GPU here", "leave it out, or see what drivetrain doctor says"
        )


def _precision(run: RunConfig, machine: Machine) -> Iterator[Problem]:
    possible = [name for name in PRECISIONS if name not in run.engine.traits.lacks]
    works = ", ".join(name for name in possible if not list(precision_gap(name, machine)))
    for gap in precision_gap(run.precision, machine):
        yield Problem("precision", f"{run.precision} was given, but {gap}", f"works here: {works}")


def precision_gap(name: str, machine: Machine) -> Iterator[str]:
    """Returns what the machine lacks for a precision."""
    need = PRECISIONS[name].needs
    if machine.device not in need.devices:
        yield f"it exists on {' and '.join(need.devices)} only and this is {machine.device_name}"
    elif machine.device == "cuda" and machine.compute_capability is None and need.nvidia_only:
        yield f"it works on NVIDIA's GPUs only and this is {machine.device_name}"
    elif machine.compute_capability is not None and machine.compute_capability < need.compute_capability:
        have, ask = (".".join(map(str, c)) for c in (machine.compute_capability, need.compute_capability))
        yield f"{machine.device_name} has compute capability {have}; it needs {ask}"


def _batch(run: RunConfig) -> Iterator[Problem]:
    if (run.batch_size is None) == (run.batch_size_per_device is None):
        given = "neither was given" if run.batch_size is None else "both were given"
        yield Problem("batch_size", f"of batch_size and batch_size_per_device {given}", "give one of the two")
    elif run.global_batch < run.data_parallel_size:
        yield Problem(
            "batch_size",
            f"the batch ({run.global_batch}) < the devices that share it ({run.data_parallel_size})",
            "give at least one sample for each device",
        )
    if run.micro_batch_size == "auto" and run.micro_batch_tokens is not None:
        yield Problem("micro_batch_size", "auto looks for what micro_batch_tokens gives", "give one of the two")


def _processes(run: RunConfig, machine: Machine) -> Iterator[Problem]:
    wanted = run.devices // run.nodes
    if machine.device == "cuda" and wanted > machine.device_count:
        yield Problem("processes", f"{wanted} were given, but this machine has {machine.device_count} GPUs", "one each")


def _length(run: RunConfig) -> Iterator[Problem]:
    yield from numerics_problems(run.numerics)
    if (run.loop.epochs is None) == (run.loop.steps is None):
        neither = run.loop.epochs is None
        given = "neither was given" if neither else "both were given"
        unsaid = "" if neither else "; loop.epochs=null (or loop.steps=null) takes back what the run file gives"
        yield Problem("loop", f"of epochs and steps {given}", f"give one of the two{unsaid}")
    if run.schedule.warmup_steps and run.schedule.warmup_ratio:
        yield Problem("schedule", "warmup_steps and warmup_ratio were both given", "give one of the two")
    if run.loop.steps is not None and run.schedule.warmup_steps > run.loop.steps:
        yield Problem(
            "schedule.warmup_steps",
            f"warmup_steps ({run.schedule.warmup_steps}) > loop.steps ({run.loop.steps})",
            "warm up over fewer steps",
        )


def _model(run: RunConfig) -> Iterator[Problem]:
    if isinstance(run.workload, OwnCode):
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
    for key, path in (("trust_remote_code", model.path), ("trust_tokenizer_code", getattr(model, "tokenizer", None))):
        if getattr(model, key, False) and path is None:
            of = "path" if key == "trust_remote_code" else "tokenizer"
            yield Problem(
                f"workload.model.{key}", f"it allows code beside workload.model.{of}, and there is none", "leave it out"
            )
    if isinstance(run.workload, TextClassification) and run.workload.model.path is None and not model_tokenizer(run):
        yield Problem(
            "workload.model.tokenizer",
            "is required when the model is made from a config",
            "give a tokenizer folder, a vocab.txt or a hub id",
        )


def _loss(run: RunConfig) -> Iterator[Problem]:
    if not isinstance(run.workload, ImageClassification | TextClassification):
        return
    loss = run.workload.loss
    if loss.focal_gamma and loss.label_smoothing:
        why = "focal loss asks how likely the one right class is, which smoothed targets do not have"
        yield Problem("workload.loss", why, "give focal_gamma or label_smoothing")
    given = loss.class_weights
    if given is not None and given != "balanced" and not any(given.values() if isinstance(given, dict) else given):
        fix = "give weights above 0, or leave it out"
        yield Problem("workload.loss.class_weights", "no class weighs anything", fix)


def _unpadded(run: RunConfig) -> Iterator[Problem]:
    if isinstance(run.workload, TextClassification) and run.workload.data.unpadded is True:
        why = why_padded(run)
        if why is not None:
            yield Problem("workload.data.unpadded", f"true was given, but {why}", "leave it out")


def _stream(run: RunConfig) -> Iterator[Problem]:
    """Reports settings that have no effect with a stream, or without one."""
    workload = run.workload
    if isinstance(workload, TextClassification) and workload.data.classes is not None and not workload.data.stream:
        why = "the classes are the labels of the training data, unless these are a stream"
        yield Problem("workload.data.classes", why, "leave it out, or give stream: true")
    if isinstance(workload, LanguageModel) and workload.data.stream and workload.data.documents not in ("file", "line"):
        why = "of text files that are streamed each line is a text"
        yield Problem("workload.data.documents", why, "leave it out, or give stream: false")


def _adapter(run: RunConfig) -> Iterator[Problem]:
    if run.quantised_base is not None:
        yield from quantised_base_problems(run.quantised_base, run.adapter is not None)
    if run.adapter is None:
        return
    if run.quantised_base is not None and any(adapter.pissa for adapter in run.adapter):
        why = "PiSSA changes the weights that it starts from, which quantised ones cannot follow"
        yield Problem("adapter.pissa", why, "leave it or quantised_base out")
    yield from adapter_problems(run.adapter)
    if not isinstance(run.workload, OwnCode) and run.workload.model.config is not None:
        why = "a model made from a config starts at random: nobody could load the adapter without it"
        yield Problem("adapter", why, "train the model first, and give its checkpoint's folder as workload.model.path")
    if run.recompute and any(adapter.method == "prefix" for adapter in run.adapter):
        yield Problem("recompute", "a block that is computed twice would see the prefix twice", "leave it out")
    yield from run.engine.adapter_problems(run.adapter, run.compile is True)
    if isinstance(run.workload, LanguageModel):
        model = run.workload.model
        if model.train_last_blocks is not None:
            yield Problem("workload.model.train_last_blocks", "adapters freeze all blocks", "leave it or adapter out")
        if model.resize_vocabulary:
            why = "the new rows of the embedding would be of no base that the adapter could be loaded on"
            yield Problem("workload.model.resize_vocabulary", why, "resize and save the base first")


def _quantisation(run: RunConfig) -> Iterator[Problem]:
    if run.quantised_base is not None and run.precision_spec.fp8:
        why = "quantised_base keeps codes, of which weights are made in 16 bits: no product would take 8-bit floats"
        yield Problem("precision", why, "give bf16-mixed, or leave quantised_base out")
    if run.quantisation_aware is not None:
        has_codes = run.quantised_base is not None
        yield from quantisation_aware_problems(run.quantisation_aware, run.precision_spec, run.adapter or (), has_codes)


def model_tokenizer(run: RunConfig) -> str | None:
    assert isinstance(run.workload, TextClassification)
    return run.workload.model.tokenizer or run.workload.model.path


def _paths(run: RunConfig) -> Iterator[Problem]:
    """Reports missing files. A hub id looks like a relative path, so a path is refused only if it cannot be a hub
    id."""
    if isinstance(run.workload, UserModule):
        yield from _missing("workload.path", run.workload.path)
        if run.workload.path.exists() and not run.workload.path.is_file():
            yield Problem("workload.path", f"{run.workload.path} is a folder, a pipe or a device", "give a Python file")
    if isinstance(run.workload, OwnCode):
        return
    if isinstance(run.workload, LanguageModel):
        yield from _language_paths(run.workload.data)
        return
    if isinstance(run.workload, ImageClassification):
        yield from _picture_paths(run.workload.data)
        return
    yield from _train_and_evaluation(run.workload.data)


def _picture_paths(data: ImageData) -> Iterator[Problem]:
    if data.source == "digits":
        if data.train is not None or data.evaluation is not None:
            fix = "leave train and evaluation out"
            yield Problem("workload.data.train", "digits are bundled and take no path", fix)
        return
    if data.train is None:
        yield Problem("workload.data.train", f"is required for source {data.source}", "give a folder, file or hub id")
    # reading shards names those that a pattern of theirs lacks
    yield from _train_and_evaluation(data, marks="{*?[" if data.source in {"webdataset", "parquet"} else "")


def _train_and_evaluation(data: ImageData | TextData, marks: str = "") -> Iterator[Problem]:
    """marks: a path that contains one of these is not checked."""
    is_hub = isinstance(data, ImageData) and data.source == "hub"
    for field, path in (("train", data.train), ("evaluation", data.evaluation)):
        if path is None or is_hub or looks_like_hub_id(path) or any(mark in path for mark in marks):
            continue
        yield from _missing(f"workload.data.{field}", Path(path))


def _language_paths(data: LanguageData) -> Iterator[Problem]:
    """With a registry of data sets, the files behind a name are known only after it is read."""
    if data.registry is not None:
        yield from _missing("workload.data.registry", data.registry)
        return
    for field, sources in (("train", data.train), ("evaluation", data.evaluation or [])):
        for source in sources:
            if not looks_like_hub_id(source.path):
                yield from _missing(f"workload.data.{field}", Path(source.path).expanduser())


def looks_like_hub_id(path: str) -> bool:
    """Returns whether a text is `name` or `owner/name` without a file ending; an existing local path of that form
    wins."""
    given = Path(path)
    return not given.exists() and not given.is_absolute() and len(given.parts) == 2 and "." not in given.name


def _missing(field: str, path: Path) -> Iterator[Problem]:
    """A path with wildcards stands for all files that match."""
    if glob.has_magic(str(path)) and not path.exists():
        if not glob.glob(str(path), recursive=True):
            fix = f"patterns are taken from the current folder, {Path.cwd()}"
            yield MissingPath(field, f"{path} matches no file", fix, path)
    elif not path.exists():
        fix = f"paths are taken from the current folder, {Path.cwd()}"
        yield MissingPath(field, f"{path} does not exist", fix, path)
