"""Writes a run's model as a folder that plain Transformers loads, its adapters merged into the base."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint.convert.foreign import Note
from drivetrain.checkpoint.convert.own_format import find
from drivetrain.checkpoint.convert.to_others import DTYPES, written_aside
from drivetrain.checkpoint.convert.transformers_folder import copy_assets
from drivetrain.config.load import load
from drivetrain.errors import UserError, problem
from drivetrain.inference.whole_model import loaded_model
from drivetrain.launch.prepare import run_file_of
from drivetrain.models.classifier_config import quiet
from drivetrain.models.merged_adapters import is_whole
from drivetrain.runtime.new_folder import refuse_taken

GENERATION = "generation_config.json"
OF_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_base.json", "base_config.json")
LARGEST_SHARD = 5 * 2**30


def merge_to(path: Path, output: Path, dtype: str | None, trust: bool = False) -> tuple[Path, list[Note]]:
    """Writes base and adapters as one model into `output`, with tokenizer and chat template, or how pictures are
    prepared.

    path: a run's folder, whose newest good checkpoint is taken, or a checkpoint within one. output: new or empty.
    dtype: fp32 (the default), bf16 or fp16. Returns the checkpoint that was read, and the notes. Raises UserError for
    a run without adapters, and for adapters that are no part of any weight (prompts, prefixes).
    """
    if dtype is not None and dtype not in DTYPES:
        raise problem("--dtype", f"{dtype} was given", f"give {', '.join(DTYPES)}")
    source, skipped = find(path)
    folder = path if (path / "run.yaml").is_file() else source.parent.parent
    run, problems = load(*run_file_of(folder, []))
    if run is None or problems:
        raise UserError(problems)
    if run.adapter is None:
        raise problem("--merge", f"{folder} was trained without adapters", "leave --merge out")
    refuse_taken(output)  # before the model is loaded
    model = loaded_model(run, source, trust=trust)
    if not is_whole(model):
        why = f"what {run.folder} trained is no part of the base's weights: {type(model).__name__}"
        raise problem("--merge", why, "leave --merge out: PEFT's files are written, for PeftModel.from_pretrained")
    notes = written_aside(output, partial(_write, model, source, DTYPES[dtype or "fp32"]))
    return source, [*notes, *(Note("newer checkpoint", carried=False, what=why) for why in skipped)]


def write_model(model: Any, source: Path, dtype: torch.dtype, into: Path, largest_shard: int = LARGEST_SHARD) -> None:
    """Writes a whole Transformers model into a folder, with what lies beside the weights of the checkpoint `source`:
    tokenizer, chat template, generation settings, preparation of pictures, Python files of its class.

    largest_shard: bytes above which weights are split over files; a single tensor is never split. The model is changed
    to the dtype in place.
    """
    copy_assets(source, into, leave_out={*OF_ADAPTERS, "config.json"}.__contains__)
    settings = (into / GENERATION).read_bytes() if (into / GENERATION).is_file() else None
    with quiet():
        model.to(dtype).save_pretrained(into, max_shard_size=largest_shard)
    if settings is not None:  # Transformers wrote the base's over them
        (into / GENERATION).write_bytes(settings)


def _write(model: Any, source: Path, dtype: torch.dtype, into: Path) -> list[Note]:
    write_model(model, source, dtype, into)
    weights = f"base and adapters in one, {str(dtype).removeprefix('torch.')}"
    assets = ", ".join(sorted(each.name for each in into.iterdir() if not each.name.startswith("model")))
    return [
        Note("weights", carried=True, what=weights),
        Note("assets", carried=True, what=assets),
        Note("optimizer's states", carried=False, what="the format has no place for them"),
    ]
