"""How a model's makers let it write: Transformers' generation_config.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.config.files import read_json

DRAWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class GenerationSettings:
    """ends: tokens that end an answer. drawn: those of DRAWN that differ from their defaults."""

    ends: frozenset[int] = frozenset()
    drawn: dict[str, Any] = field(default_factory=dict)


def generation_settings(folder: Path, model: Any) -> GenerationSettings:
    """Returns the settings beside a model's weights; of a folder without such a file the model's own."""
    from transformers import GenerationConfig

    found = getattr(model, "generation_config", None)
    if (folder / "generation_config.json").is_file():
        found = GenerationConfig.from_dict(read_json(folder / "generation_config.json"))
    if found is None:
        return GenerationSettings()
    ends = found.eos_token_id
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    names = DRAWN if found.do_sample else ("repetition_penalty",)  # the others have no effect
    drawn = {name: value for name in names if (value := getattr(found, name, None)) is not None}
    if found.do_sample:
        drawn.setdefault("temperature", 1.0)
    return GenerationSettings(frozenset(map(int, listed)), drawn)
