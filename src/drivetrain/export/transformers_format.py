"""Writes a folder that plain Transformers loads: adapters merged, weights in shards, perhaps in 8 or 4 bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import nn

from drivetrain.checkpoint.convert.merging import write_model
from drivetrain.checkpoint.convert.to_others import DTYPES
from drivetrain.errors import problem
from drivetrain.export.runtimes.with_torch import digests_of
from drivetrain.export.source import Source
from drivetrain.export.written import Written
from drivetrain.models import int4_export, rounded_export
from drivetrain.models.linear_layers import plain_layers

WHOLE = ".whole"
# of a layer's inputs, whose weights share a scale, and of its outputs: bitsandbytes' kernel for CPUs takes blocks of 32
MULTIPLES = {"int4": (int4_export.GROUP, 1), "nf4": (rounded_export.BLOCK, 32)}


def write(model: Any, source: Source, into: Path) -> Written:
    """Writes the model, which is changed to the request's dtype in place. Returns the digests of its weights, where
    they are plain tensors."""
    request = source.request
    dtype = DTYPES[request.dtype or "fp32"]
    few = [] if request.quantise is None else _layers_in_few_bits(model, source)
    if request.quantise == "int4":
        int4_export.pack(model.to(dtype), few)
    if request.quantise in (None, "int4"):
        write_model(model, source.checkpoint, dtype, into, request.shard_bytes)
        return Written(weights=digests_of(model) if request.quantise is None else None)
    names = {name for group in few for name in group}
    others = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and name not in names]
    whole = into / WHOLE
    whole.mkdir()
    write_model(model, source.checkpoint, dtype, whole, request.shard_bytes)
    rounded_export.save_rounded(
        whole, into, source.auto_class, request.numbers, others, source.trusts, request.shard_bytes
    )
    for file in whole.iterdir():  # the tokenizer and the like
        if not (into / file.name).exists() and not file.name.startswith("model"):
            shutil.move(file, into / file.name)
    shutil.rmtree(whole)
    return Written()


def _layers_in_few_bits(model: Any, source: Source) -> list[list[str]]:
    """Returns all names of each layer whose shape the numbers fit. The head, which is no part of the base model, keeps
    its numbers: few bits cost most there. Raises UserError if there are none."""
    numbers = source.request.numbers
    inputs, outputs = MULTIPLES.get(numbers, (1, 1))
    layers = [names for names in plain_layers(model) if names[0].startswith(f"{model.base_model_prefix}.")]
    shapes = {names[0]: model.get_submodule(names[0]).weight.shape for names in layers}
    odd = [name for name, (rows, columns) in shapes.items() if columns % inputs or rows % outputs]
    needs = f"inputs that are a multiple of {inputs}" + (f" and outputs of {outputs}" if outputs > 1 else "")
    if len(odd) == len(layers):
        which = f"with {needs}" if layers else "but its head"
        why = f"{type(model).__name__} has no linear layers {which}, and {numbers} rounds no others"
        raise problem("--quantise", why, "leave it out, or give --to gguf if it is a language model")
    if odd:
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        source.notes.append(f"{odd[0]}{more} is not in {numbers}, which takes layers with {needs}")
    return [names for names in layers if names[0] not in odd]
