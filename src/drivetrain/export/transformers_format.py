"""Writes a folder that plain Transformers loads: adapters merged, weights in shards, perhaps in 8 bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.convert.merging import write_model
from drivetrain.checkpoint.convert.to_others import DTYPES
from drivetrain.export.runtimes.with_torch import digests_of
from drivetrain.export.source import Source
from drivetrain.export.written import Written
from drivetrain.models.torchao_export import save_rounded

WHOLE = ".whole"


def write(model: Any, source: Source, into: Path) -> Written:
    """Writes the model, which is changed to the request's dtype in place. Returns the digests of its weights, where
    they are plain tensors."""
    request = source.request
    dtype = DTYPES[request.dtype or "fp32"]
    if request.quantise is None:
        write_model(model, source.checkpoint, dtype, into, request.shard_bytes)
        return Written(weights=digests_of(model))
    whole = into / WHOLE
    whole.mkdir()
    write_model(model, source.checkpoint, dtype, whole, request.shard_bytes)
    save_rounded(whole, into, source.auto_class, request.quantise, source.trusts, request.shard_bytes)
    for file in whole.iterdir():  # the tokenizer and the like
        if not (into / file.name).exists() and not file.name.startswith("model"):
            shutil.move(file, into / file.name)
    shutil.rmtree(whole)
    return Written()
