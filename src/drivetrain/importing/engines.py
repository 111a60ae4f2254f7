"""Adds other software's defaults to DeepSpeed's JSON and Accelerate's YAML, which config/ translates, and handles a few
odd values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from drivetrain.config import accelerate, deepspeed
from drivetrain.config.translation import Note, Translation
from drivetrain.errors import Problem
from drivetrain.importing.key_reader import OF_JUNK, junk, switch, with_errors
from drivetrain.importing.translated_file import Default, Source, TranslatedFile, leaves

Translate = Callable[[Mapping[str, Any]], Translation]


def of_deepspeed(source: Source, driver: str | None) -> TranslatedFile:  # noqa: ARG001 - it names the engine itself
    """Translates DeepSpeed's JSON. Keys for DeepSpeed alone stay in engine.config; all others become fields of the run
    file."""
    found = TranslatedFile(source)
    found.translation = _checked(found, deepspeed.translate, source.raw)
    settings = found.translation.settings
    settings["engine.name"] = "deepspeed"
    if found.translation.passed:
        settings["engine.config"] = _with_places(found.translation.passed, settings)
    found.defaults["engine.stage"] = Default("zero_optimization.stage", 0)
    _scaling(found)
    _rising(found)
    found.translation.notes = [replace(note, key=source.prefix + note.key) for note in found.notes]
    return found


def _with_places(passed: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the device to blocks of offloading options: without it they would mean none."""
    zero = passed.get("zero_optimization", {})
    places = {"offload_optimizer": "engine.offload_optimizer", "offload_param": "engine.offload_parameters"}
    blocks = {name: {"device": settings[to], **zero[name]} for name, to in places.items() if name in zero}
    return {**passed, "zero_optimization": {**zero, **blocks}} if blocks else passed


def _scaling(found: TranslatedFile) -> None:
    fp16 = found.source.raw.get("fp16")
    if isinstance(fp16, dict) and fp16.get("enabled") is True and "loss_scale_window" not in fp16:
        found.defaults["scaler.growth_interval"] = Default("fp16.loss_scale_window", 1000)


def _rising(found: TranslatedFile) -> None:
    """Sets the default warm-up of its schedules, over 1000 steps (by a logarithm, which config/ reports)."""
    settings, scheduler = found.translation.settings, found.source.raw.get("scheduler")
    if not isinstance(scheduler, dict) or "schedule.name" not in settings:
        return
    given = scheduler.get("params")
    params = given if isinstance(given, dict) else {}
    if "warmup_num_steps" not in params:
        found.defaults["schedule.warmup_steps"] = Default("scheduler.params.warmup_num_steps", 1000)
    if settings["schedule.name"] == "cosine" and "cos_min_ratio" not in params:
        found.defaults["schedule.final_lr_ratio"] = Default("scheduler.params.cos_min_ratio", 1e-4)


def of_accelerate(source: Source, driver: str | None) -> TranslatedFile:  # noqa: ARG001 - it names the engine itself
    found = TranslatedFile(source)
    raw = dict(source.raw)
    if raw.get("use_cpu") is not None:
        with_errors(found, lambda: raw.update(use_cpu=switch("use_cpu", raw["use_cpu"])))
    file = _without_file(raw)
    found.translation = _checked(found, accelerate.translate, raw, "distributed_type")
    if file is not None:
        found.translation.note("deepspeed_config.deepspeed_config_file", "mapped", f"read: {file}")
    elif found.translation.settings.get("engine.name") == "deepspeed":
        found.defaults["engine.stage"] = Default("deepspeed_config.zero_stage", 2)
    if str(raw.get("distributed_type", "NO")).upper() == "NO":
        _alone(found)
    if str(raw.get("mixed_precision", "")).lower() == "no":
        found.soft.add("precision")
    _as_written(found)
    return found


def _without_file(raw: dict[str, Any]) -> str | None:
    """Takes deepspeed_config_file out: it is a source of its own."""
    block = raw.get("deepspeed_config")
    if not isinstance(block, dict) or not isinstance(block.get("deepspeed_config_file"), str):
        return None
    raw["deepspeed_config"] = {key: value for key, value in block.items() if key != "deepspeed_config_file"}
    return str(block["deepspeed_config_file"])


def _alone(found: TranslatedFile) -> None:
    """Reads distributed_type NO as one process without DDP. Another file may still name an engine."""
    translation = found.translation
    translation.settings["engine.name"] = "single"
    found.soft.add("engine.name")
    count = translation.settings.get("processes")
    alone = count in (None, 1)
    if alone:
        translation.settings.pop("processes", None)
    notes = {"distributed_type": Note("distributed_type", "mapped", "engine.name: single", "engine.name", "single")}
    if alone:
        notes["num_processes"] = Note("num_processes", "unneeded", "engine=single is one process")
    translation.notes = [notes.get(note.key, note) for note in translation.notes]
    if "distributed_type" not in found.source.raw:
        translation.notes = [note for note in translation.notes if note.key != "distributed_type"]


PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}


def _as_written(found: TranslatedFile) -> None:
    """Puts notes under the keys of the file: optional prefixes are restored; a single machine is noted too."""
    written = set(leaves(found.source.raw))
    notes = []
    for note in found.notes:
        block, _, name = note.key.rpartition(".")
        prefix = PREFIXES.get(block, f"{block}_")
        ways = (note.key, f"{block}.{prefix}{name}", f"{block}.{name.removeprefix(prefix)}")
        notes.append(replace(note, key=next((way for way in ways if way in written), note.key)))
    if "num_machines" in written and not any(note.key == "num_machines" for note in notes):
        notes.append(Note("num_machines", "unneeded", "one machine"))
    found.translation.notes = notes


def _checked(found: TranslatedFile, translate: Translate, raw: Mapping[str, Any], context: str = "") -> Translation:
    """Returns the translation, and a problem for each key with an invalid value: without it, another run would be made.

    context: the key that others depend on.
    """
    translation = _without_junk(found, translate, raw, context)
    for note in translation.with_fate("refused"):
        if not note.is_readable:
            found.problems.append(Problem(note.key, note.why, "correct it, or leave it out"))
    return translation


def _without_junk(found: TranslatedFile, translate: Translate, raw: Mapping[str, Any], context: str) -> Translation:
    try:
        return translate(raw)
    except OF_JUNK:
        pass
    left = dict(raw)
    for key, value in raw.items():
        try:
            translate({name: raw[name] for name in raw if name in (key, context)})
        except OF_JUNK:
            found.problems += junk(key, value).problems
            del left[key]
    try:
        return translate(left)
    except OF_JUNK:
        found.problems += junk("its keys together", dict(raw)).problems
        return Translation()
