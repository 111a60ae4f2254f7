"""Writes a run's model with its adapters merged into the base: a folder that plain Transformers loads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from drivetrain.api.loading import load, run_of
from drivetrain.checkpoint.convert.foreign import Note
from drivetrain.checkpoint.convert.own_format import find
from drivetrain.checkpoint.convert.to_others import DTYPES, written_aside
from drivetrain.errors import problem

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
    if run_of(folder).adapter is None:
        raise problem("--merge", f"{folder} was trained without adapters", "leave --merge out")
    write: Callable[[Path], list[Note]] = partial(_write, folder, source, DTYPES[dtype or "fp32"], trust)
    notes = written_aside(output, write)
    return source, [*notes, *(Note("newer checkpoint", carried=False, what=why) for why in skipped)]


def _write(folder: Path, source: Path, dtype: torch.dtype, trust: bool, into: Path) -> list[Note]:
    from transformers import PreTrainedModel

    model = load(folder, str(source), trust=trust)
    if not isinstance(model, PreTrainedModel):
        why = f"what {folder} trained is no part of the base's weights: {type(model).__name__}"
        raise problem("--merge", why, "leave --merge out: PEFT's files are written, for PeftModel.from_pretrained")
    tokenizer = vars(model).pop("tokenizer", None)
    model.to(dtype).save_pretrained(into)
    if tokenizer is not None:
        tokenizer.save_pretrained(into)
    if (source / PICTURES).is_file():
        (into / PICTURES).write_bytes((source / PICTURES).read_bytes())
    weights = f"base and adapters in one, {str(dtype).removeprefix('torch.')}"
    assets = ", ".join(sorted(each.name for each in into.iterdir() if not each.name.startswith("model")))
    return [
        Note("weights", carried=True, what=weights),
        Note("assets", carried=True, what=assets),
        Note("optimizer's states", carried=False, what="the format has no place for them"),
    ]
