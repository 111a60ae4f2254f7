"""Imports files: reads, translates, merges, combines, writes. Nothing is written before everything is known to be
right."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from drivetrain.config import accelerate
from drivetrain.config.files import read_json, read_yaml
from drivetrain.config.rules import check_anywhere
from drivetrain.config.run import RunConfig
from drivetrain.config.translation import Note
from drivetrain.errors import Problem, UserError, problem
from drivetrain.importing import llama_commands, llama_v1, trl_preferences
from drivetrain.importing.chat_template import missing_template
from drivetrain.importing.combine import combined, judged
from drivetrain.importing.merge import join
from drivetrain.importing.mesh_axes import is_shared, onto_the_mesh
from drivetrain.importing.recognise import KINDS, checked, kind_of, read
from drivetrain.importing.training_spread import is_sharded
from drivetrain.importing.translated_file import Source, TranslatedFile, complete, settle
from drivetrain.importing.write import as_yaml, check_place, header, in_yaml, write
from drivetrain.runtime.store_cache import shown_path

T = TypeVar("T")
MESH = "mesh"


@dataclass(frozen=True)
class Imported:
    output: Path | None  # None where the files train nothing
    notes: list[tuple[str, Note]]  # of which file
    missing: list[str]  # what the run file still lacks
    run: RunConfig | None  # None where something is missing
    commands: list[str]  # that do what the files ask for beside training
    problems: list[Problem]  # of the run file, on every machine


def import_files(
    files: Sequence[Path],
    onto: Path | None,
    output: Path | None,
    overwrite: bool = False,
    without: Collection[str] = (),
) -> Imported:
    """Imports files. Raises UserError with every problem of every file; then nothing was written.

    without: keys that may be dropped although something else is trained without them.
    """
    output = output or Path(f"{files[0].stem}-run.yaml")
    problems: list[Problem] = []
    below = _kept(problems, lambda: {} if onto is None else checked(read_yaml(onto), shown_path(onto))) or {}
    sources = _sources(files, problems)
    founds = _translated(sources, problems)
    problems += _dropped(founds, without)
    asked = _kept(problems, lambda: [line for source in sources for line in _commands(source)]) or []
    trains = onto is not None or not sources or not all(map(_only_answers, sources))
    if not trains and not problems:
        return Imported(None, _labelled(founds), [], None, asked, [])
    if trains:
        _kept(problems, lambda: check_place(output, overwrite, files))
    joined = join(founds)
    raw, defaults = combined(joined, below)
    run, wrong, missing = judged(raw, joined, None if onto is None else shown_path(onto))
    if run is not None and (lacking := missing_template(run)) is not None:
        run, missing = None, [lacking]
    problems += [*joined.problems, *wrong]
    if problems:
        raise UserError(list(dict.fromkeys(problems)))
    made = ", ".join(f"{source.label} ({KINDS[source.kind].title})" for source in sources)
    made += "" if onto is None else f", onto {shown_path(onto)}"
    head = header(made, [note for _, note in _labelled(founds)], defaults)
    head += f"# Missing: {', '.join(missing)}. The run cannot start without.\n" if missing else ""
    unfit = [] if run is None else _unfit(run)
    head += "".join(f"# It cannot train yet. {each.field}: {each.why}; {each.fix}.\n" for each in unfit)
    write(output, f"{head}\n{as_yaml(raw)}", raw)
    labels = {note: found.source.label for found in founds for note in defaults if _is_of(note, found)}
    notes = [*_labelled(founds), *((labels.get(note, ""), note) for note in defaults)]
    return Imported(output, notes, missing, run, asked, unfit)


def _unfit(run: RunConfig) -> list[Problem]:
    """Returns the problems of a run on every machine. A path that is absent here may be there on another."""
    absent = set(run.workload.path_problems())
    return [found for found in check_anywhere(run) if found not in absent]


def _labelled(founds: Sequence[TranslatedFile]) -> list[tuple[str, Note]]:
    return [(found.source.label, note) for found in founds for note in found.notes]


def _commands(source: Source) -> list[str]:
    return llama_commands.commands(source.raw) if source.kind == "llama_factory" else []


def _only_answers(source: Source) -> bool:
    return source.kind == "llama_factory" and llama_commands.only_answers(source.raw)


def _is_of(note: Note, found: TranslatedFile) -> bool:
    return any(default.key == note.key for default in found.defaults.values())


def _kept(problems: list[Problem], work: Callable[[], T]) -> T | None:
    try:
        return work()
    except UserError as error:
        problems += error.problems
        return None


# --- reading ---------------------------------------------------------------------------------------------------------


def _sources(files: Sequence[Path], problems: list[Problem]) -> list[Source]:
    """Returns the files, and the DeepSpeed configurations within them or named by them."""
    given = [source for file in dict.fromkeys(files) if (source := _kept(problems, partial(read, file)))]
    named = []
    for source in given:
        found = _kept(problems, partial(_deepspeed_of, source, given))
        named += [] if found is None else [found]
    return [*given, *{source.label: source for source in named}.values()]


# kind → the block and the key that name a DeepSpeed JSON
DEEPSPEED_WITHIN = {
    "accelerate": ("deepspeed_config", "deepspeed_config_file"),
    "llama_factory": ("", "deepspeed"),
    "llama_factory_v1": ("dist_config", "config_file"),
    "training_arguments": ("", "deepspeed"),
    **dict.fromkeys(("trl_grpo", *trl_preferences.TRAINERS), ("", "deepspeed")),
}


def _deepspeed_of(source: Source, given: Sequence[Source]) -> Source | None:
    """Returns the configuration that `deepspeed` of TrainingArguments, or deepspeed_config_file of Accelerate,
    names."""
    within, key = DEEPSPEED_WITHIN.get(source.kind, ("", ""))
    block = source.raw.get(within) if within else source.raw
    value = block.get(key) if isinstance(block, dict) else None
    if not key or not value:
        return None
    if isinstance(value, dict):
        if within:
            raise problem(f"{source.label}: {within}.{key}", "is no path", "give the path of a JSON")
        return Source(f"{source.label}: {key}", "deepspeed", value, source.folder, f"{source.prefix}{key}.")
    if not isinstance(value, str):
        raise problem(f"{source.label}: {key}", f"{value!r} was given", "give the path of a JSON, or its content")
    if any(Path(other.label).name == Path(value).name for other in given if other.kind == "deepspeed"):
        return None
    path = Path(os.path.normpath(source.folder / value if (source.folder / value).exists() else value))
    if not path.exists():
        why = f"{value} is neither in {source.folder} nor in the current folder"
        raise problem(f"{source.label}: {key}", why, "give that file as a further one to import")
    raw = checked(read_json(path), str(path))
    if kind_of(raw, str(path)) != "deepspeed":
        raise problem(f"{source.label}: {key}", f"{path} is no DeepSpeed configuration", "correct the path")
    return Source(shown_path(path), "deepspeed", raw, path.parent)


# --- translating -----------------------------------------------------------------------------------------------------


def _translated(sources: Sequence[Source], problems: list[Problem]) -> list[TranslatedFile]:
    drivers = [name for source in sources if (name := _driver(source))]
    driver = MESH if any(map(is_shared, sources)) else next(iter(drivers), None)
    founds = []
    for source in sources:
        kind = KINDS[source.kind]
        found = kind.translate(source, driver)
        if driver == MESH:
            onto_the_mesh(found)
        found.translation.notes = list(map(_readable, found.notes))
        settle(found)
        complete(found, sorted(kind.names))
        problems += [Problem(f"{source.label}: {p.field}", p.why, p.fix) for p in found.problems]
        founds.append(found)
    return founds


def _dropped(founds: Sequence[TranslatedFile], without: Collection[str]) -> list[Problem]:
    """Returns a problem for each key that is dropped although something else is trained without it, unless `without`
    has it."""
    notes = [(found, note) for found in founds for note in found.translation.with_fate("refused", "later")]
    altering = [(found, note) for found, note in notes if note.alters and not any(_names(n, note) for n in without)]
    fix = "take it out, or accept by --without {} that something else is trained"
    problems = [Problem(f"{found.source.label}: {n.key}", n.why, fix.format(n.key)) for found, n in altering]
    idle = [name for name in without if not any(_names(name, note) for _, note in notes)]
    return problems + [Problem(f"--without {name}", "no such key is dropped", "leave it out") for name in idle]


def _names(name: str, note: Note) -> bool:
    """Returns whether this is the note's key, its end, or a block that it is in."""
    return f".{name}." in f".{note.key}."


def _readable(note: Note) -> Note:
    """Returns a key with its value as in the run file; Python would write None, True and quotes."""
    prefix = f"{note.to}: {note.value}"
    if not note.to or not note.why.startswith(prefix):
        return note
    return replace(note, why=f"{note.to}: {in_yaml(note.value)}{note.why.removeprefix(prefix)}")


def _driver(source: Source) -> str | None:
    """Returns the engine that decides what bf16 and fp16 mean."""
    raw: dict[str, Any] = source.raw
    if source.kind == "deepspeed":
        return "deepspeed"
    if source.kind == "accelerate":
        name = accelerate.DRIVERS.get(str(raw.get("distributed_type", "NO")).upper())
        return name if name in ("fsdp", "deepspeed") else None
    if source.kind == "llama_factory_v1":
        return llama_v1.engine_of(raw)
    if source.kind in ("llama_factory", "training_arguments", "trl_grpo", *trl_preferences.TRAINERS):
        return "deepspeed" if raw.get("deepspeed") else "fsdp" if is_sharded(raw) else None
    return None
