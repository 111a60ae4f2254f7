"""Translates an XTuner configuration (mmengine's style).

Keys: XTuner 0.1 and mmengine's Runner, https://mmengine.readthedocs.io. Its counts are iterations, one a micro-batch;
here a step is one update of the weights.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from drivetrain.config.translation import Handler, fated
from drivetrain.errors import problem
from drivetrain.importing.key_reader import KeyReader, count, in_turn
from drivetrain.importing.python_file import READ_BY, SKIPPED
from drivetrain.importing.python_values import Unknown
from drivetrain.importing.training_arguments import COPIED
from drivetrain.importing.training_keys import UNPAGED
from drivetrain.importing.training_rhythm import at_the_end
from drivetrain.importing.translated_file import UNKNOWN_KEY, Default, Source, TranslatedFile
from drivetrain.importing.xtuner_keys import CLIPPING, LOADER, LOOP, RUNNER, RUNTIME, WRAPPER
from drivetrain.importing.xtuner_model import model
from drivetrain.importing.xtuner_schedule import schedule

NEEDED = ("train_dataloader", "optim_wrapper", "train_cfg", "param_scheduler", "default_hooks")

Group = Callable[[KeyReader, int], None]  # with the iterations of a step


def check(raw: Mapping[str, Any], label: str) -> None:
    """Raises UserError if the Python file is something else."""
    if not any(name in raw for name in NEEDED):
        text = str(raw.get("trainer", ""))
        style = "an XTuner V1 file, which is another format" if "Trainer" in text else "no mmengine configuration"
        raise problem(label, f"is {style}: it sets none of {', '.join(NEEDED)}", "give an XTuner configuration file")


def translate(source: Source, driver: str | None) -> TranslatedFile:
    raw = {name: value for name, value in source.raw.items() if name not in (SKIPPED, READ_BY)}
    found = TranslatedFile(replace(source, raw=raw))
    given = KeyReader(raw, found, source.prefix)
    groups: list[Callable[[KeyReader], None]] = [
        _batch,
        lambda given: _optimizer(given, driver),
        lambda given: schedule(given, _iterations(given)),
        lambda given: _length(given, _iterations(given)),
        lambda given: _hooks(given, _iterations(given)),
        _running,
        model,
    ]
    in_turn(given, groups)
    read_by = source.raw.get(READ_BY, {})
    given.rest({name: _variable(read_by.get(name, [])) for name in raw if name not in RUNNER} | RUNNER)
    for line, text in source.raw.get(SKIPPED, {}).items():
        found.translation.note(line, "refused", f"files are read, never run: {text}")
    return found


def _variable(readers: list[str]) -> Handler:
    """Notes a name that only serves within the file."""

    def handle(key: str, value: Any, into: Any) -> None:
        near = difflib.get_close_matches(key, list(RUNNER), n=1, cutoff=0.85)
        if readers:
            into.note(key, "unneeded", f"see {', '.join(readers)}, which it is part of")
        elif near:
            into.note(key, "refused", f"{UNKNOWN_KEY}; did you mean {near[0]}?")
        elif isinstance(value, Unknown):
            into.note(key, "refused", f"files are read, never run: {value}")
        else:
            into.note(key, "unneeded", "nothing in the file reads it")

    return handle


def _iterations(given: KeyReader) -> int:
    """Returns the iterations of one step."""
    wrapper = given.raw.get("optim_wrapper")
    value = wrapper.get("accumulative_counts") if isinstance(wrapper, dict) else None
    return max(1, count(f"{given.prefix}optim_wrapper.accumulative_counts", 1 if value is None else value))


# --- batch and optimizer ---------------------------------------------------------------------------------------------


def _batch(given: KeyReader) -> None:
    loader, iterations = given.block("train_dataloader"), _iterations(given)
    if loader.has("batch_size"):
        micro = loader.count("batch_size", 1)
        if iterations > 1:
            loader.set("batch_size", "micro_batch_size", micro)
            wrapper = KeyReader({"accumulative_counts": iterations}, given.found, f"{given.prefix}optim_wrapper.")
            wrapper.set("accumulative_counts", "batch_size_per_device", micro * iterations)
        else:
            loader.set("batch_size", "batch_size_per_device", micro)
    if loader.has("num_workers"):
        loader.set("num_workers", "loader.workers", loader.count("num_workers", 0))
    loader.rest(LOADER)
    evaluated = given.block("val_dataloader")
    if evaluated.has("batch_size"):
        evaluated.set("batch_size", "evaluation.batch_size", evaluated.count("batch_size", 1))
    evaluated.rest(LOADER)


def _optimizer(given: KeyReader, driver: str | None) -> None:
    wrapper = given.block("optim_wrapper")
    _precision(wrapper, driver)
    if wrapper.take("clip_grad"):
        clipped = wrapper.block("clip_grad")
        if clipped.has("max_norm"):
            clipped.set("max_norm", "loop.max_grad_norm", clipped.number("max_norm", 1.0) or None)
        clipped.rest(CLIPPING)
    wrapper.used.add("accumulative_counts")
    if not any(note.key == f"{wrapper.prefix}accumulative_counts" for note in given.found.notes):
        wrapper.off("accumulative_counts", why="a batch is not cut")
    _update(wrapper.block("optimizer"))
    wrapper.rest(WRAPPER)


def _precision(wrapper: KeyReader, driver: str | None) -> None:
    """Translates the precision: AmpOptimWrapper is autocast in `dtype`; by itself it takes float16 on a GPU."""
    kind = str(wrapper.take("type", "OptimWrapper")).rsplit(".", 1)[-1]
    dtype = str(wrapper.take("dtype", "float16")).rsplit(".", 1)[-1]
    if kind == "AmpOptimWrapper":
        short = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype)
        if short is None:
            raise problem(f"{wrapper.prefix}dtype", f"{dtype} was given", "give float16 or bfloat16")
        precision = COPIED.get(driver or "", {}).get(short, f"{short}-mixed")
        key = "dtype" if wrapper.has("dtype") else "type"
        wrapper.set(key, "precision", precision)
        wrapper.off("type" if key == "dtype" else "dtype", why="precision says it")
    elif kind in ("OptimWrapper", "DeepSpeedOptimWrapper"):
        if kind == "OptimWrapper":
            wrapper.set("type", "precision", "fp32", is_soft=True)
        else:
            wrapper.off("type", why="a DeepSpeed JSON beside it sets it")
        wrapper.off("dtype", why="nothing is cast")
    else:
        wrapper.lose("type", f"{kind}: there are OptimWrapper and AmpOptimWrapper")
    scale = wrapper.take("loss_scale", "dynamic")
    if isinstance(scale, dict):
        within = wrapper.block("loss_scale")
        for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval"):
            if within.has(name):
                within.set(name, f"scaler.{name}", within.number(name, 1))
        within.rest({"enabled": fated("unneeded", "precision says it")})
    elif scale == "dynamic":
        wrapper.off("loss_scale", why="the scale is dynamic")
    else:
        wrapper.note("loss_scale", "refused", "a loss scale that never changes; the scale is dynamic here")


OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "PagedAdamW32bit": "adamw", "PagedAdamW": "adamw"}
OPTIMIZERS |= {"AdamW8bit": "bnb-adamw8bit", "PagedAdamW8bit": "bnb-paged-adamw8bit"}
OWN = {"adamw", "adam", "sgd", "bnb-adamw8bit", "bnb-paged-adamw8bit"}  # others take betas and eps as options
DECAYS = dict.fromkeys(
    ("AdamW", "AdamW8bit", "PagedAdamW", "PagedAdamW32bit", "PagedAdamW8bit"), 0.01
)  # the classes' own default


def _update(given: KeyReader) -> None:
    path = str(given.take("type", ""))
    name = path.rsplit(".", 1)[-1]
    if name in OPTIMIZERS:
        unpaged = name.startswith("Paged") and "paged" not in OPTIMIZERS[name]
        given.set("type", "optimizer.name", OPTIMIZERS[name], UNPAGED if unpaged else "")
    elif "." in path:
        module = path.rsplit(".", 1)[0]
        given.set("type", "optimizer.name", f"{module}:{name}", "its package has to be installed")
    elif name:
        given.lose("type", f"{name}: name an optimizer by its import path in optimizer.name")
    if given.has("lr"):
        given.set("lr", "optimizer.lr", given.number("lr", 0.0))
    for key in ("eps", "momentum", "betas") if OPTIMIZERS.get(name, "") in OWN else ():
        if given.has(key):
            given.set(key, f"optimizer.{key}", given.take(key) if key == "betas" else given.number(key, 0.0))
    decay = given.number("weight_decay", DECAYS.get(name, 0.0))
    if given.has("weight_decay"):
        why = "biases and normalisation weights are left out" if decay else ""
        given.set("weight_decay", "optimizer.weight_decay", decay, why)
    elif decay:
        given.found.defaults["optimizer.weight_decay"] = Default(f"{given.prefix}weight_decay", decay)
    given.rest({key: _option for key in given.raw})


def _option(key: str, value: Any, into: Any) -> None:
    into.set(key, f"optimizer.options.{key.rsplit('.', 1)[-1]}", value)


# --- length, hooks, running ------------------------------------------------------------------------------------------


def _length(given: KeyReader, iterations: int) -> None:
    loop = given.block("train_cfg")
    if loop.has("max_epochs"):
        loop.set("max_epochs", "loop.epochs", loop.count("max_epochs", 1))
        loop.off("max_iters", why="max_epochs says it")
    elif loop.has("max_iters"):
        most = loop.count("max_iters", 1)
        loop.set("max_iters", "loop.steps", -(-most // iterations), _divided(most, iterations))
    if loop.has("val_interval"):
        every = _cadence(loop, "val_interval")
        if _by_epoch(loop):
            loop.set("val_interval", "evaluation.every_epochs", every)
        else:
            steps = max(1, every // iterations)
            loop.set("val_interval", "evaluation.every_steps", steps, _divided(every, iterations))
    loop.rest(LOOP)


def _by_epoch(loop: KeyReader) -> bool:
    loop.off("by_epoch", why="read with val_interval")
    return loop.has("max_epochs") and loop.switch("by_epoch", True)


def _cadence(given: KeyReader, key: str) -> int:
    """Translates an interval, which mmengine itself requires above 0: only a checkpoint's may be -1."""
    every = given.count(key, 1)
    if every < 1:
        raise problem(given.prefix + key, f"{every} was given", "give 1 or more")
    return every


def _divided(given: int, iterations: int) -> str:
    return f"{given} iterations, {iterations} a step" if iterations > 1 else ""


def _hooks(given: KeyReader, iterations: int) -> None:
    hooks = given.block("default_hooks")
    if isinstance(hooks.take("checkpoint"), dict):
        saved = hooks.block("checkpoint")
        by_epoch = saved.switch("by_epoch", True)
        saved.off("by_epoch", why="read with interval")
        every = saved.count("interval", -1)
        if every <= 0:
            at_the_end(saved, "interval")
        elif not by_epoch:
            saved.set("interval", "checkpoints.every_steps", max(1, every // iterations), _divided(every, iterations))
        else:
            saved.note("interval", "changed", "saved at each evaluation, which is after each epoch, and at the end")
        kept = saved.count("max_keep_ckpts", -1)
        if kept > 0:
            saved.set("max_keep_ckpts", "checkpoints.keep_last", kept)
        else:
            saved.note("max_keep_ckpts", "changed", "checkpoints.keep_last sets how many are kept")
        saved.rest(dict.fromkeys(saved.raw, fated("unneeded", "a checkpoint holds all that resuming needs")))
    if isinstance(hooks.take("logger"), dict):
        logger = hooks.block("logger")
        if logger.has("interval"):
            every = _cadence(logger, "interval")
            logger.set("interval", "tracking.log_every", max(1, every // iterations), _divided(every, iterations))
        logger.rest(dict.fromkeys(logger.raw, RUNTIME))
    hooks.rest(dict.fromkeys(hooks.raw, RUNTIME))


def _running(given: KeyReader) -> None:
    for key, to in {"work_dir": "output", "experiment_name": "name"}.items():
        if given.has(key):
            given.set(key, to, str(given.take(key)))
    if given.take("randomness"):
        chance = given.block("randomness")
        if chance.has("seed"):
            chance.set("seed", "seed", chance.count("seed", 0))
        if chance.has("deterministic"):
            chance.set("deterministic", "deterministic", chance.switch("deterministic"))
        chance.rest({"diff_rank_seed": fated("unneeded", "dropout draws other masks on each rank")})
    if "Tensorboard" in str(given.take("visualizer", "")):
        given.set("visualizer", "tracking.trackers", ["progress", "tensorboard"])
    else:
        given.note("visualizer", "unneeded", "progress is shown; tracking.trackers names who else listens")
    if given.take("resume"):
        given.note("resume", "refused", "--resume goes on from a checkpoint of this project only")
    given.off("resume")
