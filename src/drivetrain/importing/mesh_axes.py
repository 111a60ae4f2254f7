"""Translates ranks that share a sample in other software (tensor, context and sequence parallel) to degrees of
engine=mesh.

In both the number of data ranks is the world size over these degrees, so that settings of one device hold for one such
group: batch_size_per_device of a run on the mesh counts groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from drivetrain.config import accelerate
from drivetrain.config.engines import KINDS
from drivetrain.config.translation import Note
from drivetrain.errors import problem
from drivetrain.importing.key_reader import OF_JUNK, count, with_errors
from drivetrain.importing.translated_file import Source, TranslatedFile

PREFIX = "parallelism_config_"
_OF_ACCELERATE = {  # Accelerate's ParallelismConfig; sp is DeepSpeed's Ulysses
    f"parallelism_config.{prefix}{name}": degree
    for prefix in ("", PREFIX)
    for name, degree in (("tp_size", "tp"), ("cp_size", "cp"), ("sp_size", "cp"))
}
# kind of file → key → the degree of the mesh that it is
DEGREES: dict[str, dict[str, str]] = {
    "accelerate": _OF_ACCELERATE,
    "training_arguments": _OF_ACCELERATE,
    "llama_factory": _OF_ACCELERATE,
    "llama_factory_v1": {"cp_size": "cp"},
    "deepspeed": {"tensor_parallel.autotp_size": "tp", "sequence_parallel_size": "cp"},
    "xtuner": {"sequence_parallel_size": "cp", "strategy.sequence_parallel_size": "cp"},
}
OPTIONS = tuple(f"engine.{name}" for name in KINDS["mesh"].model_fields)
FULL = {"bf16-master": "bf16-mixed", "fp16-master": "fp16-mixed"}
UNSHARED = "engine=mesh has no such option"


def is_shared(source: Source) -> bool:
    """Returns whether several ranks work on one sample."""
    try:
        return any(degree > 1 for _, _, degree in _degrees(source))
    except OF_JUNK:
        return False  # reported when the file is translated


def _degrees(source: Source) -> Iterator[tuple[str, str, int]]:
    """Yields key, degree of the mesh, and number of ranks, for each that the file sets."""
    for key, to in DEGREES.get(source.kind, {}).items():
        node: Any = source.raw
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        if node is not None and node != "auto":
            yield key, to, count(source.prefix + key, node)


def onto_the_mesh(found: TranslatedFile) -> None:
    """Writes the file's degrees and its sharding as fields of the mesh; called if any file has degrees."""
    with_errors(found, lambda: _lay_out(found))


def _lay_out(found: TranslatedFile) -> None:
    settings, source = found.translation.settings, found.source
    degrees = {key: (to, degree) for key, to, degree in _degrees(source) if degree > 1}
    taken = {to for to, _ in degrees.values()}
    if len(taken) < len(degrees):
        given = " and ".join(degrees)
        raise problem(f"{source.prefix}{given}", "both set which ranks share a sequence", "keep one of them")
    shards = _shards(found)
    engine = settings.get("engine.name")
    _take_out(found)
    if degrees or engine is not None:
        settings["engine.name"] = "mesh"
        found.soft.discard("engine.name")
    for key, (to, degree) in degrees.items():
        _replace(found, Note(source.prefix + key, "mapped", f"engine.{to}: {degree}", f"engine.{to}", degree))
        settings[f"engine.{to}"] = degree
    if shards is not None:
        settings["engine.shard"] = shards
    _data_ranks(found)
    _whole_copies(found)


def _shards(found: TranslatedFile) -> bool | None:
    """Returns whether ranks keep shards of parameters; None if the file does not state it."""
    settings, default = found.translation.settings, found.defaults.get("engine.stage")
    stage = settings.get("engine.stage", None if default is None else default.value)
    if settings.get("engine.name") == "deepspeed":
        return None if stage is None else stage > 0
    return True if settings.get("engine.name") == "fsdp" else None


def _take_out(found: TranslatedFile) -> None:
    """Takes settings out for which engine=mesh has no field; `shard` covers the rest."""
    settings = found.translation.settings
    gone = {name for name in settings if name.startswith("engine.") and name not in OPTIONS}
    for name in gone:
        del settings[name]
    found.defaults = {name: default for name, default in found.defaults.items() if not name.startswith("engine.")}
    notes = []
    for note in found.notes:
        if note.to in OFFLOADS and note.value not in (False, "none"):
            notes.append(Note(note.key, "refused", "engine=mesh keeps everything on the device"))
        elif note.to == "engine.name":
            notes.append(replace(note, fate="changed", why=f"engine.name: mesh, not {note.value}", value="mesh"))
        elif note.to == "engine.stage":
            why = "engine.shard shards parameters, gradients and optimizer state, or nothing"
            notes.append(Note(note.key, "changed" if note.value in (1, 2) else "mapped", why))
        elif note.to in gone or note.fate == "passed" or _wraps(note):
            notes.append(Note(note.key, "unneeded", UNSHARED))
        else:
            notes.append(note)
    found.translation.notes = notes


def _wraps(note: Note) -> bool:
    """Returns whether a note is on fsdp_auto_wrap_policy, which decides on engine.wrap together with other keys."""
    return note.key.endswith(accelerate.POLICY.removeprefix("fsdp_"))


OFFLOADS = ("engine.offload", "engine.offload_optimizer", "engine.offload_parameters", "engine.nvme_path")


def _data_ranks(found: TranslatedFile) -> None:
    """Translates data ranks: Accelerate counts those that replicate and those that shard; their product is the world
    size."""
    block = found.source.raw.get("parallelism_config")
    if not isinstance(block, Mapping):
        return
    sizes = {name.removeprefix(PREFIX): (name, size) for name, size in block.items() if size is not None}
    keys = [sizes[name][0] for name in ("dp_replicate_size", "dp_shard_size") if name in sizes]
    where = f"{found.source.prefix}parallelism_config."
    degrees = {name: count(where + key, size) for name, (key, size) in sizes.items() if name.endswith("_size")}
    settings = found.translation.settings
    copies, parts = degrees.get("dp_replicate_size", 1), degrees.get("dp_shard_size", 1)
    if not degrees.get("sp_size", 1) > 1:  # whose data ranks DeepSpeed makes of what the others leave
        settings["engine.dp"] = copies * parts
        settings["engine.shard"] = parts > 1 or degrees.get("cp_size", 1) > 1
        why = f"engine.dp: {copies * parts}"
        over = "; shards are spread over all of them" if copies > 1 and parts > 1 else ""
        for key in keys:
            _replace(found, Note(where + key, "changed" if over else "mapped", why + over, "engine.dp", copies * parts))
    for name, (key, _) in sizes.items():
        if not name.endswith("_size"):
            _replace(found, Note(where + key, "unneeded", "how ranks trade parts of a sequence changes no number"))
        elif degrees[name] == 1 and where + key not in {note.key for note in found.notes if note.to}:
            _replace(found, Note(where + key, "unneeded", "it is off"))


def _whole_copies(found: TranslatedFile) -> None:
    """Notes that a mesh keeps one copy of the weights, in fp32, and computes under autocast."""
    settings = found.translation.settings
    name = settings.get("precision")
    if name not in FULL:
        return
    settings["precision"] = FULL[name]
    why = f"precision: {FULL[name]}; autocast over fp32 parameters, in place of copies in 16 bits"
    notes = [replace(n, fate="changed", why=why, value=FULL[name]) if n.to == "precision" else n for n in found.notes]
    found.translation.notes = notes


def _replace(found: TranslatedFile, note: Note) -> None:
    found.translation.notes = [*(n for n in found.notes if n.key != note.key), note]
