"""Writes the adapters alone, in the files that plain PEFT loads over their base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.convert.transformers_folder import copy_assets
from drivetrain.export.source import Source
from drivetrain.export.written import Written
from drivetrain.models.adapter_files import CONFIG

BASE_CONFIG = "base_config.json"
OWN = ("adapter_base.json",)  # what only this project reads


def write(model: Any, source: Source, into: Path) -> Written:
    """Copies the checkpoint's files, which are PEFT's. The base's own config goes along as base_config.json, as
    Transformers would otherwise take the folder for a whole model."""
    del model
    copy_assets(source.checkpoint, into, lambda name: Path(name).name in OWN)
    adapters = sorted(str(file.parent.relative_to(into)) for file in into.rglob(CONFIG))
    base = json.loads((into / adapters[0] / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    return Written(asked={"adapters": adapters, "base": base, "base_config": str(into / BASE_CONFIG)})
