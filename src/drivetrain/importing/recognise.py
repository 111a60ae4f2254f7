"""Recognises the software that a file configures, by its keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain.config import accelerate, deepspeed, deepspeed_zero
from drivetrain.config.files import MOST_JSON_BYTES, read_json, read_text, read_yaml
from drivetrain.config.preference import DPO, KTO, LOSSES
from drivetrain.config.reinforcement import GRPO
from drivetrain.config.reinforcement import LOSSES as OF_ANSWERS
from drivetrain.errors import UserError, problem
from drivetrain.importing import (
    engines,
    llama_factory,
    llama_v1,
    llama_v1_model,
    training_arguments,
    training_keys,
    trl_grpo,
    trl_preferences,
    xtuner,
    xtuner_keys,
)
from drivetrain.importing.python_file import read_python
from drivetrain.importing.translated_file import Source, TranslatedFile, plain
from drivetrain.runtime.store_cache import shown_path


@dataclass(frozen=True)
class Kind:
    title: str
    names: frozenset[str]  # its keys, also those within blocks
    translate: Callable[[Source, str | None], TranslatedFile]
    marks: frozenset[str] = frozenset()  # keys that no other software has; any of them will do


_TRAINING = frozenset((*training_keys.KEYS, *training_keys.TOGETHER))
_LLAMA = frozenset((*llama_factory.KEYS, *llama_factory.TOGETHER))
_LLAMA_V1 = frozenset((*llama_v1.KEYS, *llama_v1.TOGETHER, *llama_v1_model.KEYS))
_ACCELERATE = frozenset((*accelerate.KEYS, *accelerate.TOGETHER))
_GRPO = frozenset((*trl_grpo.KEYS, *trl_grpo.TOGETHER))
_TRL = {
    "trl_grpo": _GRPO,
    **{kind: frozenset((*trl_preferences.KEYS, *of.together)) for kind, of in trl_preferences.TRAINERS.items()},
}
_DEEPSPEED = frozenset((*deepspeed.KEYS, *deepspeed.BATCH))
KINDS: dict[str, Kind] = {
    "xtuner": Kind("an XTuner configuration", frozenset(xtuner_keys.RUNNER), xtuner.translate),
    "accelerate": Kind(
        "an Accelerate configuration",
        _ACCELERATE | frozenset((*accelerate.FSDP, *accelerate.DEEPSPEED)),
        engines.of_accelerate,
        frozenset(("distributed_type", "compute_environment")),
    ),
    "llama_factory": Kind(
        "a LLaMA-Factory run",
        _LLAMA | _TRAINING,
        llama_factory.translate,
        _LLAMA - _TRAINING - {"dataset", "packing", "streaming", "fp8", "temperature", "max_length", "top_k", "top_p"},
    ),
    "llama_factory_v1": Kind(
        "a LLaMA-Factory v1 run", _LLAMA_V1, llama_v1.translate, frozenset((*llama_v1.OWN, *_LLAMA_V1 & _LLAMA))
    ),
    "trl_grpo": Kind("TRL's GRPO", _GRPO | _TRAINING, trl_grpo.translate, _GRPO - _TRAINING - _LLAMA - _LLAMA_V1),
    **{
        kind: Kind(
            trainer.title,
            _TRL[kind] | _TRAINING,
            partial(trl_preferences.translate, kind),
            _TRL[kind] - _TRAINING - _LLAMA - _LLAMA_V1,
        )
        for kind, trainer in trl_preferences.TRAINERS.items()
    },
    "training_arguments": Kind("Transformers' TrainingArguments", _TRAINING, training_arguments.translate),
    "deepspeed": Kind(
        "a DeepSpeed configuration",
        _DEEPSPEED | frozenset((*deepspeed_zero.ZERO, *deepspeed.HALF, *deepspeed.OPTIMIZER, *deepspeed.SCHEDULER)),
        engines.of_deepspeed,
        frozenset(("zero_optimization", *deepspeed.BATCH[:2])),
    ),
}
DPO_LOSSES, KTO_LOSSES = (frozenset(n for n, row in LOSSES.items() if stage in row.stages) for stage in (DPO, KTO))
GRPO_LOSSES = frozenset(name for name, row in OF_ANSWERS.items() if GRPO in row.stages)
CURE = (
    "give a YAML of `accelerate config`, a DeepSpeed JSON, a LLaMA-Factory YAML, a TrainingArguments JSON, that of "
    "one of TRL's trainers or an XTuner configuration"
)
READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    ".yaml": read_yaml,
    ".yml": read_yaml,
    ".json": read_json,
    ".py": read_python,
}


def read(path: Path) -> Source:
    """Reads a file. Raises UserError if it cannot be read, or is of no known kind."""
    if path.is_dir():
        raise problem(str(path), "is a folder", CURE)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise problem(str(path), f"its name does not end in {', '.join(READERS)}", CURE)
    _hold_something(path)
    raw = checked(reader(path), str(path))
    return Source(
        shown_path(path), kind_of(raw, shown_path(path), is_python=path.suffix.lower() == ".py"), raw, path.parent
    )


def checked(raw: Any, label: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = plain(raw)
    except ValueError as error:
        raise problem(label, str(error), "write it out plainly") from None
    return found


def kind_of(raw: Mapping[str, Any], label: str, is_python: bool = False) -> str:
    if is_python:
        xtuner.check(raw, label)
        return "xtuner"
    if "workload" in raw:
        raise problem(label, "is a run file of this project already", "train it, or give it as --onto")
    marked = [name for name, kind in KINDS.items() if kind.marks & raw.keys()]
    if not raw.keys() & {*llama_v1.OWN}:  # marks of both versions are of the old one
        marked = [name for name in marked if name != "llama_factory_v1"]
    if "dataset" not in raw and any(name in _TRL for name in marked):  # which a LLaMA-Factory run that trains has
        marked = [name for name in marked if name in _TRL]
    if marked:
        most = max(marked, key=lambda name: len(KINDS[name].marks & raw.keys()))
        return trainer_of(raw, label) if most in _TRL else most
    tops = {"deepspeed": _DEEPSPEED, "training_arguments": _TRAINING, "accelerate": _ACCELERATE}
    best = max(tops, key=lambda name: len(tops[name] & raw.keys()))
    if not tops[best] & raw.keys():
        raise problem(label, f"is of no known kind: {_some(raw)}", CURE)
    if best == "training_arguments" and "dataset" in raw:
        return "llama_factory"
    return best


def trainer_of(raw: Mapping[str, Any], label: str) -> str:
    """Returns which of TRL's trainers a configuration is of: by keys that no other has, else by the loss that it names.
    Raises UserError where neither says it, since TRL's command says it there."""
    shared = {kind: frozenset().union(*(keys for other, keys in _TRL.items() if other != kind)) for kind in _TRL}
    own = {kind: len((keys - shared[kind] - _TRAINING) & raw.keys()) for kind, keys in _TRL.items()}
    best = max(own, key=lambda kind: own[kind])
    if own[best]:
        return best
    given = raw.get("loss_type")
    names = {str(name) for name in (given if isinstance(given, list) else [given])}
    tables = {"trl_kto": KTO_LOSSES, "trl_dpo": DPO_LOSSES, "trl_grpo": GRPO_LOSSES}
    found = [kind for kind, table in tables.items() if names <= table]
    if len(found) != 1:
        why = "it may be of any of TRL's trainers, which its command names, not the file"
        raise problem(label, why, "add loss_type (sigmoid: DPO, kto, dapo: GRPO), or center_rewards_coefficient: 0")
    return found[0]


def _some(names: Iterable[str]) -> str:
    shown = [json.dumps(name, ensure_ascii=False) for name in names][:3]
    return f"its keys are {', '.join(shown)} ..." if shown else "it has no keys"


def _hold_something(path: Path) -> None:
    """Reports empty files: the readers' errors about them are meant for run files."""
    try:
        text = read_text(path, MOST_JSON_BYTES)
    except UserError:
        return  # the reader says why
    if not any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines()):
        raise problem(str(path), "the file is empty", CURE)
