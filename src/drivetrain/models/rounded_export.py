"""Rounds a folder's linear layers by torchao or bitsandbytes, in the form that plain Transformers loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.models.classifier_config import quiet
from drivetrain.runtime.library_messages import hush

BLOCK = 64  # weights with one scale in NF4


def save_rounded(
    source: Path, into: Path, auto_class: str, numbers: str, whole: Sequence[str], trusted: bool, largest_shard: int
) -> None:
    """Writes the model at `source` into `into`, the weights of its linear layers rounded to `numbers`: int8 (a scale
    for each row), fp8 (e4m3, a scale for each tensor) or nf4 (QLoRA's 16 values, a scale for each BLOCK, kept in 8
    bits). Only weights are rounded, each by its own largest number, so that no data are needed to calibrate.

    whole: names of layers that nf4 leaves as they are; the others take those that Transformers chooses.
    """
    hush()
    import transformers

    auto = getattr(transformers, auto_class)
    config = _config(numbers, whole)
    with quiet():
        model = auto.from_pretrained(source, quantization_config=config, dtype="auto", trust_remote_code=trusted)
        model.save_pretrained(into, max_shard_size=largest_shard)


def _config(numbers: str, whole: Sequence[str]) -> Any:
    import transformers

    if numbers == "nf4":
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            llm_int8_skip_modules=list(whole),
        )
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    kinds = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}
    return transformers.TorchAoConfig(kinds[numbers]())
