"""Reads what a model's small files show, config.json and the tokenizer's, without building the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drivetrain.config.files import read_json
from drivetrain.errors import Problem, UserError

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def context_of(config: Mapping[str, Any]) -> int | None:
    """Returns the longest sequence that a Transformers config states; None if it states none, or scales its positions,
    which has rules of its own."""
    if config.get("rope_scaling") or config.get("rope_parameters"):
        return None
    text = config.get("text_config")
    places = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    return places if isinstance(places, int) else None


def beyond_context(places: int | None, length: int, field: str, fix: str) -> Iterator[Problem]:
    """Yields a problem of `field` if samples of `length` tokens are longer than the model's positions. places: how many
    these are; None if no bound is known."""
    if places is not None and places < length:
        name = field.rpartition(".")[2]
        yield Problem(field, f"{name} ({length}) > the model's context ({places}; max_position_embeddings)", fix)


def lacks_template(folder: Path) -> bool:
    """Returns whether a tokenizer's folder has no chat template. False for a folder that is not there or cannot be
    read, which the loading of the tokenizer reports."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return False
    if any((folder / name).exists() for name in TEMPLATE_FILES):
        return False
    file = folder / TOKENIZER_FILES[0]
    if not file.is_file():
        return True
    try:
        return not read_json(file).get("chat_template")
    except UserError:
        return False
