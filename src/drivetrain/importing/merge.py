"""Merges several files: their common settings, and their contradictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.config.translation import Note, agree
from drivetrain.errors import Problem
from drivetrain.importing.translated_file import Default, TranslatedFile

# of these a run file has one
EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    ("batch_size", "batch_size_per_device"),
    ("loop.steps", "loop.epochs"),
    ("schedule.warmup_steps", "schedule.warmup_ratio"),
)


@dataclass
class Joined:
    settings: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Default] = field(default_factory=dict)  # of what no file says
    by: dict[str, TranslatedFile] = field(default_factory=dict)  # field → who says it
    problems: list[Problem] = field(default_factory=list)


def join(founds: Sequence[TranslatedFile]) -> Joined:
    joined = Joined()
    _engine(founds)
    for name in dict.fromkeys(name for found in founds for name in found.translation.settings):
        _field(name, [found for found in founds if name in found.translation.settings], joined)
    _one_length(joined)
    _one_batch(joined)
    for pair in EXCLUSIVE:
        _one_of(pair, joined)
    for found in founds:
        for name, default in found.defaults.items():
            if not any(other in joined.settings for other in alternatives(name)):
                joined.defaults.setdefault(name, default)
    return joined


def alternatives(name: str) -> tuple[str, ...]:
    """Returns the field and its alternatives in a run file."""
    return next((names for names in EXCLUSIVE if name in names), (name,))


def _field(name: str, saying: Sequence[TranslatedFile], joined: Joined) -> None:
    """Merges a field. A file that states only what happens anyway yields to the others; those have to agree."""
    firm = [found for found in saying if not _is_soft(found, name)] or list(saying)
    first = firm[0]
    value = first.translation.settings[name]
    joined.settings[name], joined.by[name] = value, first
    for other in saying:
        their = other.translation.settings[name]
        if agree(their, value):
            continue
        if other in firm:
            why = f"{_stated(first, name)}, but {_stated(other, name)}"
            joined.problems.append(Problem(name, why, "correct one of them, or leave it out there"))
        else:
            _yield(other, name, f"{first.source.label} says {value}")


def _is_soft(found: TranslatedFile, name: str) -> bool:
    """Returns whether a setting is soft: a switch that is off is written by every configurator, and means little."""
    value = found.translation.settings[name]
    return name in found.soft or value is False or value in ("auto", "none")


def _stated(found: TranslatedFile, name: str) -> str:
    key = found.key_of(name)
    return f"{found.source.label} says {found.translation.settings[name]}" + (f" ({key})" if key else "")


def _yield(found: TranslatedFile, name: str, why: str) -> None:
    """Ignores this file's value of a field, with a note."""
    del found.translation.settings[name]
    notes = [Note(n.key, "unneeded", f"{name}: {why}") if n.to == name else n for n in found.notes]
    found.translation.notes = notes


def _engine(founds: Sequence[TranslatedFile]) -> None:
    """Ignores all engine settings of a file whose engine does not count."""
    naming = [found for found in founds if "engine.name" in found.translation.settings]
    firm = [found for found in naming if "engine.name" not in found.soft]
    firm = firm or [found for found in naming if found.translation.settings["engine.name"] != "single"]
    for found in naming:
        if firm and found not in firm:
            name = firm[0].translation.settings["engine.name"]
            for setting in [s for s in found.translation.settings if s.startswith("engine.")]:
                _yield(found, setting, f"{firm[0].source.label} says engine.name: {name}")
            found.defaults = {key: value for key, value in found.defaults.items() if not key.startswith("engine.")}


def _one_length(joined: Joined) -> None:
    """Reads a DeepSpeed schedule's total_num_steps as a length only if no other file states one."""
    steps = joined.by.get("loop.steps")
    if steps is not None and steps.source.kind == "deepspeed" and "loop.epochs" in joined.settings:
        _yield(steps, "loop.steps", f"{joined.by['loop.epochs'].source.label} says the length, in epochs")
        del joined.settings["loop.steps"], joined.by["loop.steps"]


def _one_batch(joined: Joined) -> None:
    """Merges the global batch and that of a device, from two files or one, if they fit."""
    whole, each = joined.settings.get("batch_size"), joined.settings.get("batch_size_per_device")
    if whole is None or each is None:
        return
    first, other = joined.by["batch_size"], joined.by["batch_size_per_device"]
    ranks = joined.settings.get("processes")
    ranks = None if ranks is None else ranks * joined.settings.get("nodes", 1) // _sharing(joined)
    if "batch_size_per_device" not in other.soft and ranks is not None and whole != each * ranks:
        why = f"{_stated(first, 'batch_size')}, but {_stated(other, 'batch_size_per_device')} on {ranks} devices"
        joined.problems.append(Problem("batch_size", why, "correct one of them, or leave it out there"))
    _yield(other, "batch_size_per_device", f"{first.source.label} says batch_size: {whole}")
    del joined.settings["batch_size_per_device"], joined.by["batch_size_per_device"]


def _sharing(joined: Joined) -> int:
    """Returns the number of ranks that work on one sample."""
    return math.prod(joined.settings.get(f"engine.{degree}", 1) for degree in ("pp", "cp", "tp"))


def _one_of(pair: tuple[str, ...], joined: Joined) -> None:
    if all(name in joined.settings for name in pair):
        why = " and ".join(_stated(joined.by[name], name) for name in pair)
        joined.problems.append(Problem(" and ".join(pair), f"{why}: a run has one of them", "leave one of them out"))
