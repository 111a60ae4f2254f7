"""Looks whether the tokenizer of an imported run has a chat template, where it is a folder here."""

from __future__ import annotations

from pathlib import Path

from drivetrain.config.files import MOST_JSON_BYTES, BrokenText, parsed_json, read_text
from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError

TOKENIZER = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def missing_template(run: RunConfig) -> str | None:
    """Returns what the run file lacks if its conversations have no template: neither it names one, nor does the folder
    of its tokenizer have one. None where there is one, or the folder is not here."""
    owner = run.workload.template_owner
    folder = Path(owner or "").expanduser()
    if owner is None or not any((folder / name).is_file() for name in TOKENIZER) or _has_template(folder):
        return None
    return (
        f"workload.data.template (the tokenizer in {folder} has no chat template, as those of base models have none: "
        "give the path of the chat_template.jinja that the Instruct model of its family has, or one of alpaca, chatml, "
        "vicuna, plain)"
    )


def _has_template(folder: Path) -> bool:
    if any((folder / name).exists() for name in TEMPLATES):
        return True
    try:
        config = parsed_json(read_text(folder / TOKENIZER[0], MOST_JSON_BYTES))
    except (UserError, BrokenText):  # loading the tokenizer says what is wrong with it
        return not (folder / TOKENIZER[0]).exists()
    return isinstance(config, dict) and bool(config.get("chat_template"))
