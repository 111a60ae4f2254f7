"""Problems of an engine: from its table, from its options, and from a foreign configuration that it reads."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from drivetrain.config.engines import ENGINES, EngineBlock
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.config.translation import Note, Translation, agree
from drivetrain.errors import Problem


def engine_problems(run: RunConfig) -> Iterator[Problem]:
    """Yields the problems that hold on every machine."""
    yield from _from_the_table(run)
    yield from run.engine.problems(run, "engine")
    for field, translation in foreign(run):
        yield from _foreign_problems(run, field, translation)


def engine_problems_here(run: RunConfig, machine: Machine) -> Iterator[Problem]:
    """Yields the problems that this machine adds."""
    yield from run.engine.problems_here(run, machine, "engine")


def is_default(run: RunConfig, field: str) -> bool:
    """Returns whether a (dotted) field has its default value."""
    *blocks, name = field.split(".")
    block: BaseModel = functools.reduce(getattr, blocks, run)
    return bool(getattr(block, name) == type(block).model_fields[name].get_default(call_default_factory=True))


def _from_the_table(run: RunConfig) -> Iterator[Problem]:
    name, found = run.engine.label, run.engine.traits
    for field, why in found.refuses.items():
        if not is_default(run, field) and getattr(run, field) is not False:
            yield Problem(field, f"engine={name} cannot have it: {why}", f"leave it out, or take engine={_with(field)}")
    if run.precision in found.lacks:
        why = f"engine={name} has no {run.precision}: {found.lacks[run.precision]}"
        yield Problem("precision", why, f"take another precision, or engine={_with_precision(run.precision)}")
    if run.nodes > 1 and not found.spreads:
        yield Problem("nodes", f"{run.nodes} were given, but engine={name} runs in one process", "take engine=ddp")


def _with(field: str) -> str:
    return " or ".join(name for name, found in ENGINES.items() if field not in found.refuses)


def _with_precision(precision: str) -> str:
    return " or ".join(name for name, found in ENGINES.items() if precision not in found.lacks)


def foreign(run: RunConfig) -> Iterator[tuple[str, Translation]]:
    """Yields the configurations of other software that the run names, by field."""
    yield from ((f"engine.{place}", found) for place, found in run.engine.translations())


def is_read(field: str, run: RunConfig) -> bool:
    """Returns whether a field that a foreign configuration sets has an effect: the scaler's fields only where losses
    are scaled."""
    return run.precision_spec.scaled or not field.startswith("scaler.")


def _foreign_problems(run: RunConfig, where: str, found: Translation) -> Iterator[Problem]:
    for note in found.with_fate("refused", "later"):
        yield Problem(f"{where}.{note.key}", _why(note), "take it out, or correct it")
    for notes in found.conflicts():
        statements = ", ".join(f"{note.key} says {note.value}" for note in notes)
        yield Problem(f"{where} ({notes[0].to})", f"{statements}, and they mean one thing", "keep one of them")
    for field, wanted in found.settings.items():
        if field == "engine.name" or (field.startswith("engine.") and where != "engine.config"):
            continue
        if not is_read(field, run):
            continue
        actual = _actual(run, field)
        if not agree(wanted, actual):
            why = f"it says {field}={wanted}, but the run file says {actual}"
            yield Problem(f"{where} ({field})", why, "make them agree, or write auto")


def _why(note: Note) -> str:
    return f"not built yet: {note.why}" if note.fate == "later" else note.why


def _actual(run: RunConfig, field: str) -> Any:
    """Returns the run's value of a field that a foreign configuration names."""
    if field == "batch_size":
        return run.global_batch
    if field == "batch_size_per_device":
        return run.global_batch / run.data_parallel_size
    if field == "micro_batch_size":
        return run.micro_batch_limit or run.global_batch / run.data_parallel_size
    root: Any = run
    for part in field.split("."):
        root = root.driving if part != "name" and isinstance(root, EngineBlock) else root
        root = root.get(part) if isinstance(root, dict) else getattr(root, part)
    return str(root) if field == "engine.nvme_path" else root
