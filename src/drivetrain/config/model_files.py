"""Problems that a model's small files show, config.json and the tokenizer's, without building the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drivetrain.config.files import MOST_JSON_BYTES, BrokenText, parsed_json, read_text
from drivetrain.config.language import LanguageModel
from drivetrain.config.run import RunConfig
from drivetrain.config.workload import TextClassification
from drivetrain.errors import Problem, UserError

TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def model_file_problems(run: RunConfig) -> Iterator[Problem]:
    """Reports samples longer than the model's context, and a chat template that is nowhere. What cannot be known from
    files here (models of the hub, scaled positions) is left to the building of the model."""
    if isinstance(run.workload, TextClassification):
        yield from _max_length(run.workload)
    elif isinstance(run.workload, LanguageModel):
        yield from _length(run.workload)
        yield from _template(run.workload)


def _max_length(workload: TextClassification) -> Iterator[Problem]:
    places, length = _context(workload.model.path, workload.model.config), workload.data.max_length
    if places is not None and places < length:
        scratch = workload.model.config is not None
        why = f"max_length ({length}) > the model's positions ({places}; see max_position_embeddings)"
        fix = "shorten max_length" + (" or raise workload.model.config.max_position_embeddings" if scratch else "")
        yield Problem("workload.data.max_length", why, fix)


def _length(workload: LanguageModel) -> Iterator[Problem]:
    places, length = _context(workload.model.path, workload.model.config), workload.data.length
    if places is not None and places < length and workload.model.rope_scaling is None:
        why = f"length ({length}) > the model's context ({places}; max_position_embeddings)"
        yield Problem("workload.data.length", why, "shorten it, or give workload.model.rope_scaling")


def _context(path: str | None, given: Mapping[str, Any] | None) -> int | None:
    config = given if path is None else _json(Path(path) / "config.json")
    if config is None or config.get("rope_scaling") or config.get("rope_parameters"):
        return None  # scaled positions have rules of their own
    text = config.get("text_config")
    places = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    return places if isinstance(places, int) else None


def _template(workload: LanguageModel) -> Iterator[Problem]:
    folder = Path(workload.model.tokenizer or workload.model.path or "")
    if workload.stage == "pretrain" or workload.data.template is not None or not folder.is_dir():
        return
    config = _json(folder / "tokenizer_config.json")
    there = any((folder / name).exists() for name in TEMPLATE_FILES)
    if config is not None and not config.get("chat_template") and not there:
        fix = "give one of alpaca, vicuna, chatml, plain, or the path of a .jinja file"
        yield Problem("workload.data.template", "the tokenizer has no chat template", fix)


def _json(file: Path) -> dict[str, Any] | None:
    """Returns the object in a file; None if there is none that can be read, which the building of the model reports."""
    if not file.is_file():
        return None
    try:
        found = parsed_json(read_text(file, MOST_JSON_BYTES))
    except (BrokenText, UserError):
        return None
    return found if isinstance(found, dict) else None
