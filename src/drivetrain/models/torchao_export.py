"""Rounds a Transformers folder's linear layers to 8 bits by torchao, in the form that plain Transformers loads."""

from __future__ import annotations

from pathlib import Path

from drivetrain.runtime.library_messages import hush


def save_rounded(source: Path, into: Path, auto_class: str, numbers: str, trusted: bool, largest_shard: int) -> None:
    """Writes the model at `source` into `into`, the weights of its linear layers rounded to `numbers`: int8 (a scale
    for each row) or fp8 (e4m3, a scale for each tensor). Only weights are rounded, each by its own largest number, so
    that no data are needed to calibrate."""
    hush()
    import transformers
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    kinds = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}
    config = transformers.TorchAoConfig(kinds[numbers]())
    auto = getattr(transformers, auto_class)
    model = auto.from_pretrained(source, quantization_config=config, dtype="auto", trust_remote_code=trusted)
    model.save_pretrained(into, max_shard_size=largest_shard)
