"""Made data in the place of a run's own, where these are not there and only their number and length count (plan)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drivetrain.config.language import LanguageModel
from drivetrain.config.workload import TextClassification
from drivetrain.errors import problem

WORD = "word "  # a token has no more letters than this, with any tokenizer that knows letters
CLASSES = 2


def language(block: LanguageModel, folder: Path, samples: int, length: int) -> dict[str, Any]:
    """Writes as many rows, each of at least `length` tokens. Returns the block's `data` that reads them."""
    data = {"length": length, "evaluation_fraction": 0, "too_long": "truncate"}
    if not block.has_conversations:
        if block.model.tokenizer is not None or block.model.path is not None:
            why = "how many tokens a made text has is known for bytes alone, and the model names a tokenizer"
            raise problem("--samples", why, "leave workload.model.tokenizer out (config with its vocab_size stays)")
        file = folder / "made.txt"
        file.write_text((WORD * (samples * length // len(WORD) + 2))[: samples * length])
        return {**data, "train": str(file)}
    file = folder / "made.jsonl"
    answer = WORD * length
    row: dict[str, Any] = {"instruction": "Say something.", "output": answer}
    if block.samples == "pairs":
        other = "else " + answer  # they differ at the beginning: both are cut alike
        row = {"instruction": "Say something.", "chosen": answer, "rejected": other}
    if block.samples == "steps":
        row = {"prompt": "", "completions": [WORD * (length // 2)] * 2, "labels": [True, False]}
    with file.open("w") as rows:
        for number in range(samples):
            labelled = {"kto_tag": number % 2 == 0} if block.samples == "labelled" else {}
            asked = "prompt" if block.samples == "steps" else "instruction"
            rows.write(json.dumps({**row, **labelled, asked: f"Say {number}."}) + "\n")
    template = {} if block.data.template is None else {"template": block.data.template}
    return {**data, **template, "train": str(file), "packing": block.data.packing}


def texts(block: TextClassification, folder: Path, samples: int, length: int) -> dict[str, Any]:
    """Writes as many texts of at least `length` tokens, in two classes, beside a tenth for the evaluation."""
    files = {"train": samples, "evaluation": max(CLASSES, samples // 10)}
    for name, count in files.items():
        lines = (f"{number % CLASSES},{number} {WORD * length}" for number in range(count))
        (folder / f"{name}.csv").write_text("label,text\n" + "\n".join(lines) + "\n")
    return {
        **{name: str(folder / f"{name}.csv") for name in files},
        "max_length": length,
        "padding": block.data.padding,
        "unpadded": block.data.unpadded,
    }
