"""The part `generate`: answers of the generation engine beside Transformers' generate, by bench/generation.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.gpu.cases import Case
from bench.gpu.language import folder_of, models_of
from bench.gpu.setting import Setting

WORDS = 4_000  # tokens below this one are in every vocabulary here
BATCHES = {1: 3, 8: 2, 64: 2}  # prompts → pairs


def cases(setting: Setting) -> list[Case]:
    size = "tiny" if setting.small else "0.5B"
    model = {"size": size, "length": 64 if setting.small else 1024}
    batches = {1: 1} if setting.small else BATCHES
    return [
        *models_of([model]),
        *(
            Case(
                f"{size} | {number} prompts",
                "generate:compared",
                {"size": size, "number": number, "pairs": pairs},
                seconds=60,
                after=(f"model {size}",),
            )
            for number, pairs in batches.items()
        ),
    ]


def compared(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    """Rates of both sides in tokens a second, their ratio by pairs, and seconds to the first token."""
    import generation
    import torch
    from transformers import AutoModelForCausalLM

    from drivetrain.inference.loading import load_model

    del folder
    path, device = folder_of(setting, given["size"]), setting.device
    dtype = "float32" if setting.small else "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval()
    loaded = load_model(path, dtype=dtype)
    try:
        ours, theirs = generation.engine_side(loaded), generation.generate_side(model)
        found = generation.pairs_of(given["number"], ours, theirs, given["pairs"], WORDS)
    finally:
        loaded.close()
    return generation.figures(found)
