"""Finds the key that was probably meant by one that a run file does not have in that place."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from drivetrain.config.field_paths import TAGS, blocks_of, choices, owned_fields, tag_of
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem

# what other trainers call it: what it is called here
OTHER_NAMES = {
    "learning_rate": "lr",
    "epsilon": "eps",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "gradient_clipping": "max_grad_norm",
    "lr_scheduler_type": "schedule",
    "per_device_train_batch_size": "micro_batch_size",
    "cutoff_len": "length",
    "max_seq_length": "length",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_target": "targets",
    "lora_dropout": "dropout",
    "val_size": "evaluation_fraction",
    "packing_length": "length",
    "report_to": "trackers",
    "output_dir": "output",
    "run_name": "name",
    "num_workers": "workers",
    "dataloader_num_workers": "workers",
}
IN_ITS_PLACE = {  # what a run file has instead of a key of other trainers
    "gradient_accumulation_steps": "give batch_size, the samples of a step over all devices, and micro_batch_size, "
    "those that one device runs at once; the number of accumulated micro-batches follows",
    "fp16": "write precision=fp16-mixed",
    "bf16": "write precision=bf16-mixed",
    "deepspeed": "write engine=zero2, or engine={name: deepspeed, config: FILE}",
    "fsdp": "write engine=fsdp",
    "model_name_or_path": "write workload.model.path=FOLDER (or a hub id)",
    "dataset": "write workload.data.train=FILE",
    "eval_dataset": "write workload.data.evaluation=FILE",
    "finetuning_type": "write adapter=lora, or leave adapter out to train all weights",
    "resume_from_checkpoint": "give --resume to drivetrain train",
}
MOST_PLACES = 3


def unknown(field: str, path: Sequence[Any], raw: Any) -> Problem:
    """Returns the problem of an unknown key: with a name that is near, the block that has it, or its right place."""
    name, known = str(path[-1]), siblings(path, raw)
    elsewhere = {other: key for other, key in OTHER_NAMES.items() if key in known}
    near = difflib.get_close_matches(name, [*known, *elsewhere], n=1)
    meant = f"did you mean {elsewhere.get(near[0], near[0])}?" if near else ""
    if owners := owners_of(path):
        own = _tag_in(raw, path[0])
        fix = f"{meant} Else leave it out" if meant else "leave it out"
        return Problem(field, f"{own} has no such key: it is of {' and '.join(owners)}", fix)
    if meant:
        return Problem(field, "there is no such key", meant)
    if name in RunConfig.model_fields:
        fix = f"write {name} at the top of the run file (on the command line {name}=...)"
        return Problem(field, f"there is no such key here, but {name} is a key of its own", fix)
    if hint := elsewhere_hint(name, raw):
        return Problem(field, "there is no such key here", hint)
    fix = f"known here: {', '.join(sorted(set(known)))}" if 0 < len(known) <= 20 else "see drivetrain fields"
    return Problem(field, "there is no such key", fix)


def elsewhere_hint(name: str, raw: Any = None) -> str:
    """Returns where a run file has a key of this name, or its counterpart there; "" where it has neither.

    raw: the run file, whose kinds of workload and engine come first.
    """
    if name in IN_ITS_PLACE:
        return IN_ITS_PLACE[name]
    wanted = OTHER_NAMES.get(name, name)
    places: dict[str, set[str]] = {}
    for owner, path, _ in owned_fields():
        if path[-1] == wanted and path[:2] != ["engine", "driver"]:
            places.setdefault(".".join(path), set()).add(owner)
    chosen = {part: _tag_in(raw, part) for part in ("workload", "engine")}
    own = [place for place, owners in places.items() if owners & {"", chosen.get(place.partition(".")[0])}]
    if 0 < len(own) <= MOST_PLACES:
        return f"did you mean {' or '.join(own)}?"
    if 0 < len(places) <= MOST_PLACES and raw is not None:
        return "; ".join(f"{place} is of {' and '.join(sorted(owners))}" for place, owners in places.items())
    return f"did you mean {' or '.join(places)}?" if 0 < len(places) <= MOST_PLACES else ""


def siblings(path: Sequence[Any], raw: Any) -> list[str]:
    """Returns the names of the fields that may stand in the place of this path's last key."""
    return [key for block in blocks_at(path[:-1], raw) for key in block.model_fields]


def blocks_at(path: Sequence[Any], raw: Any) -> list[type[BaseModel]]:
    """Returns the kinds of block that a path of a run file leads to: a single one if the file itself names its kind."""
    blocks: list[type[BaseModel]] = [RunConfig]
    for part in path:
        raw = raw.get(part) if isinstance(raw, dict) else raw[part] if _has(raw, part) else None
        if isinstance(part, int):  # a place in a list of blocks
            continue
        infos = [block.model_fields[part] for block in blocks if part in block.model_fields]
        blocks = [below for info in infos for below in blocks_of(info.annotation)]
        tagged = [block for block in blocks if isinstance(raw, dict) and _is_tagged(block, raw)]
        blocks = tagged or blocks
    return blocks


def owners_of(path: Sequence[Any]) -> list[str]:
    """Returns the kinds of workload or engine that have this key at this place."""
    if not path or path[0] not in RunConfig.model_fields:
        return []
    found = []
    for block in blocks_of(RunConfig.model_fields[path[0]].annotation):
        below = [block]
        for part in path[1:-1]:
            fields = [each.model_fields[part] for each in below if part in each.model_fields]
            below = [each for field in fields for each in blocks_of(field.annotation)]
        if any(str(path[-1]) in each.model_fields for each in below) and (tag := tag_of(block)):
            found.append(tag)
    return found


def _tag_in(raw: Any, key: Any) -> str:
    """Returns the run file's name for the kind of its workload or engine."""
    block = raw.get(key) if isinstance(raw, dict) else None
    return next((str(block[tag]) for tag in TAGS if tag in block), str(key)) if isinstance(block, dict) else str(key)


def _is_tagged(block: type[BaseModel], raw: dict[str, Any]) -> bool:
    return any(key in raw and raw[key] in choices(block, key) for key in TAGS)


def _has(raw: Any, place: Any) -> bool:
    return isinstance(raw, list) and isinstance(place, int) and place < len(raw)
