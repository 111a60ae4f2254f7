"""Writes a run's model with its adapters merged into the base: a folder that plain Transformers loads."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from drivetrain.checkpoint.convert.foreign import Note
from drivetrain.checkpoint.convert.own_format import find
from drivetrain.checkpoint.convert.to_others import DTYPES, refuse_taken, written_aside
from drivetrain.config.load import load
from drivetrain.errors import UserError, problem
from drivetrain.inference.whole_model import loaded_model
from drivetrain.launch.prepare import run_file_of
from drivetrain.models.merged_adapters import is_whole, save_whole

PICTURES = "preprocessor_config.json"


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


def _write(model: nn.Module, source: Path, dtype: torch.dtype, into: Path) -> list[Note]:
    save_whole(model.to(dtype), into)
    if (source / PICTURES).is_file():
        (into / PICTURES).write_bytes((source / PICTURES).read_bytes())
    weights = f"base and adapters in one, {str(dtype).removeprefix('torch.')}"
    assets = ", ".join(sorted(each.name for each in into.iterdir() if not each.name.startswith("model")))
    return [
        Note("weights", carried=True, what=weights),
        Note("assets", carried=True, what=assets),
        Note("optimizer's states", carried=False, what="the format has no place for them"),
    ]
