"""Translates Transformers' TrainingArguments, as their own JSON or within LLaMA-Factory's YAML.

Keys and defaults: Transformers 4.46 and 5.23, https://huggingface.co/docs/transformers/main_classes/trainer
"""

from __future__ import annotations

from typing import Any

from drivetrain.config.translation import agree
from drivetrain.errors import problem
from drivetrain.importing.key_reader import KeyReader, in_turn
from drivetrain.importing.training_keys import ADAM, KEYS, OPTIMIZERS, UNPAGED
from drivetrain.importing.training_rhythm import RHYTHM
from drivetrain.importing.training_spread import spread
from drivetrain.importing.translated_file import Source, TranslatedFile

# what autocast becomes where the engine keeps 16-bit copies of fp32 weights instead
COPIED = {"fsdp": {"bf16": "bf16-master"}, "deepspeed": {"bf16": "bf16-master", "fp16": "fp16-master"}}


def translate(source: Source, driver: str | None) -> TranslatedFile:
    """Translates a file. driver: the engine that any of the files names."""
    found = TranslatedFile(source)
    given = KeyReader(source.raw, found, source.prefix)
    in_turn(given, groups(driver))
    given.rest(KEYS)
    return found


def groups(driver: str | None) -> list[Any]:
    """Reads groups of keys of which one decides what another means."""
    return [lambda given: precision(given, driver), batch, optimizer, schedule, *RHYTHM, spread, device]


# --- precision -------------------------------------------------------------------------------------------------------


def precision(given: KeyReader, driver: str | None, mixed: str = "") -> None:
    """Translates the precision: bf16 and fp16 are autocast over fp32 weights; FSDP and DeepSpeed make copies of the
    weights instead.

    mixed: further differences under autocast.
    """
    on = [name for name in ("bf16", "fp16") if given.switch(name)]
    tf32 = given.switch("tf32")
    if len(on) == 2:
        raise problem(f"{given.prefix}bf16", "bf16 and fp16 are both on", "keep one of the two")
    if on:
        name = COPIED.get(driver or "", {}).get(on[0], f"{on[0]}-mixed")
        differs = "autocast over fp32 parameters" if _uncopied(name, driver) else mixed * (driver is None)
        given.set(on[0], "precision", name, differs)
        given.off(*(other for other in ("bf16", "fp16") if other != on[0]))
        given.off("tf32", why=f"products are computed in {on[0]}" if tf32 else "it is off")
    elif tf32:
        given.set("tf32", "precision", "tf32")
        given.off("bf16", "fp16")
    else:
        first = next((name for name in ("bf16", "fp16") if given.has(name)), None)
        if first is not None:
            given.set(first, "precision", "fp32", is_soft=True)
        given.off(*(name for name in ("bf16", "fp16") if name != first), "tf32")


def _uncopied(name: str, driver: str | None) -> bool:
    return driver == "fsdp" and name == "fp16-mixed"


# --- batch -----------------------------------------------------------------------------------------------------------


def batch(given: KeyReader) -> None:
    """Translates the batch: per_device_train_batch_size runs at once, gradient_accumulation_steps times a step, on each
    device."""
    old, new, steps_key = "per_gpu_train_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"
    size_key = old if given.has(old) and not given.has(new) else new
    given.off(old, why=f"{new} says it")
    micro, steps = given.count(size_key, 8), given.count(steps_key, 1)
    if steps < 1:
        raise problem(given.prefix + steps_key, f"{steps} was given", "give 1 or more")
    soft = micro == 8 and steps == 1
    if steps == 1:
        given.set(size_key, "batch_size_per_device", micro, is_soft=soft)
        given.off(steps_key, why="a batch is not cut")
        return
    given.set(size_key, "micro_batch_size", micro)
    given.set(steps_key, "batch_size_per_device", micro * steps)


# --- optimizer and schedule ------------------------------------------------------------------------------------------


def rates(given: KeyReader) -> None:
    given.set("learning_rate", "optimizer.lr", given.number("learning_rate", 5e-5), default=5e-5)
    decay = given.number("weight_decay", 0.0)
    given.set("weight_decay", "optimizer.weight_decay", decay, is_soft=decay == 0)


def optimizer(given: KeyReader) -> None:
    rates(given)
    name = "adafactor" if given.switch("adafactor") else given.word("optim", "adamw_torch")
    key = "adafactor" if given.switch("adafactor") else "optim"
    given.off("adafactor" if key == "optim" else "optim", why=f"{key} says it")
    if name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        given.lose(key, f"there are {known}; name another by its import path in optimizer.name")
        given.off("adam_beta1", "adam_beta2", "adam_epsilon", why=f"{key} is not taken over")
        return
    path, options = OPTIMIZERS[name]
    given.set(key, "optimizer.name", path, _unlike(name, path), is_soft=path == "adamw")
    for option, value in options.items():
        given.found.translation.settings[f"optimizer.options.{option}"] = value
    if path in ADAM:
        adam(given)
    else:
        given.off("adam_beta1", "adam_beta2", "adam_epsilon", why=f"{name} has none")


def _unlike(name: str, path: str) -> str:
    return UNPAGED if "paged" in name and "paged" not in path else ""


def adam(given: KeyReader) -> None:
    betas = [given.number("adam_beta1", 0.9), given.number("adam_beta2", 0.999)]
    for key in ("adam_beta1", "adam_beta2"):
        if given.has(key):
            given.set(key, "optimizer.betas", betas, default=[0.9, 0.999])
    if given.has("adam_epsilon"):
        given.set("adam_epsilon", "optimizer.eps", given.number("adam_epsilon", 1e-8), default=1e-8)


SHAPES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}
DECAYS = {"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt"}


def schedule(given: KeyReader) -> None:
    shape = given.word("lr_scheduler_type", "linear").removeprefix("schedulertype.")
    if shape in SHAPES:
        given.set("lr_scheduler_type", "schedule.name", SHAPES[shape], is_soft=shape == "linear")
    else:
        given.lose("lr_scheduler_type", f"{shape}: there are {', '.join(SHAPES)}")
    _options(given, shape)
    if shape == "constant":
        given.off("warmup_steps", "warmup_ratio", why="constant has no warm-up there; constant_with_warmup has")
    else:
        _warmup(given)


def _options(given: KeyReader, shape: str) -> None:
    """Translates lr_scheduler_kwargs, and the defaults that some shapes have for them there."""
    settings = given.found.translation.settings
    if shape == "warmup_stable_decay":
        settings["schedule.decay_shape"] = "cosine"
    if not given.take("lr_scheduler_kwargs"):
        given.off("lr_scheduler_kwargs")
        return
    within = given.block("lr_scheduler_kwargs")
    if shape == "cosine_with_min_lr":
        _lowest(within, "min_lr", given.number("learning_rate", 5e-5))
        if not within.has("min_lr") and within.has("min_lr_rate"):
            within.set("min_lr_rate", "schedule.final_lr_ratio", within.number("min_lr_rate", 0.0))
    elif shape == "polynomial":
        _lowest(within, "lr_end", given.number("learning_rate", 5e-5))
        if within.has("power"):
            within.set("power", "schedule.power", within.number("power", 1.0))
    elif shape == "warmup_stable_decay":
        _stable(within)
    for name in within.raw:
        if name not in within.used:
            within.note(name, "refused", f"schedule has no such option for {shape}", alters=shape in SHAPES)


def _lowest(within: KeyReader, key: str, peak: float) -> None:
    """Translates the rate at which a schedule ends, as a share of the peak."""
    if within.has(key) and peak > 0:
        within.set(key, "schedule.final_lr_ratio", float(f"{within.number(key, 0.0) / peak:.12g}"))


def _stable(within: KeyReader) -> None:
    if within.has("num_decay_steps"):
        within.set("num_decay_steps", "schedule.decay_steps", within.count("num_decay_steps", 0))
    if within.has("min_lr_ratio"):
        within.set("min_lr_ratio", "schedule.final_lr_ratio", within.number("min_lr_ratio", 0.0))
    kind = within.word("decay_type", "cosine")
    if within.has("decay_type") and kind in DECAYS:
        within.set("decay_type", "schedule.decay_shape", DECAYS[kind])


def _warmup(given: KeyReader) -> None:
    """Translates the warm-up: warmup_steps wins over warmup_ratio, and below 1 it is itself a ratio."""
    steps, ratio = given.number("warmup_steps", 0.0), given.number("warmup_ratio", 0.0)
    if 0 < steps < 1:
        given.set("warmup_steps", "schedule.warmup_ratio", steps)
    elif steps:
        given.set("warmup_steps", "schedule.warmup_steps", given.count("warmup_steps", 0))
    else:
        given.off("warmup_steps", why="there is no warm-up" if not ratio else "warmup_ratio says it")
    if steps:
        given.off("warmup_ratio", why="warmup_steps says it")
    elif ratio:
        given.set("warmup_ratio", "schedule.warmup_ratio", ratio)
    else:
        given.off("warmup_ratio", why="there is no warm-up")


# --- device and seed -------------------------------------------------------------------------------------------------


def device(given: KeyReader) -> None:
    for key in ("use_cpu", "no_cuda"):
        if given.switch(key):
            given.set(key, "device", "cpu")
        else:
            given.off(key)
    given.set("seed", "seed", given.count("seed", 42), default=42)
    if given.has("data_seed") and not agree(given.take("data_seed"), given.take("seed", 42)):
        given.note("data_seed", "refused", "one seed decides the weights and the order of the data")
    else:
        given.off("data_seed", why="seed says it")
