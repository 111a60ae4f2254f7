"""Finds a chat template's text: in the tokenizer itself, in this package, or in a file."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from drivetrain.errors import problem

FOLDER = Path(__file__).with_name("templates")
SHIPPED = ("alpaca", "vicuna", "chatml", "plain")


def template_text(tokenizer: Any, source: str | None, field: str) -> tuple[str, str]:
    """Returns the template's name, for errors, and its Jinja text. source: None for the tokenizer's own, a shipped
    name, or a path.

    Raises UserError on `field` if there is none, and for a shipped one that would never end a reply with this
    tokenizer.
    """
    if source is None:
        return _own(tokenizer, field)
    if source not in SHIPPED:
        return source, _of_file(source, field)
    text = (FOLDER / f"{source}.jinja").read_text(encoding="utf-8")
    if "eos_token" in text and tokenizer.eos_token is None:
        why = f"{source} ends replies with the tokenizer's eos_token, and it has none: no reply would end"
        raise problem(field, why, "choose chatml, or set eos_token in tokenizer_config.json")
    return source, text


def _own(tokenizer: Any, field: str) -> tuple[str, str]:
    try:
        return "the tokenizer's own template", tokenizer.get_chat_template()
    except ValueError:
        why = "the tokenizer has no chat template"
        if tokenizer.chat_template is not None:
            why = f"of the tokenizer's chat templates, {', '.join(tokenizer.chat_template)}, none is named default"
        raise problem(field, why, f"give one of {', '.join(SHIPPED)}, or the path of a .jinja file") from None


def _of_file(source: str, field: str) -> str:
    path = Path(source).expanduser()
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise problem(field, f"{source} cannot be read: {error}", "give a Jinja template in UTF-8") from None
    known = f"give one of {', '.join(SHIPPED)}, the path of a .jinja file, or nothing for the tokenizer's own"
    if path.suffix or len(path.parts) > 1:
        fix = f"paths are taken from the current folder, {Path.cwd()}; {known}"
        raise problem(field, f"{source} does not exist", fix)
    near = get_close_matches(source.lower(), SHIPPED, n=1)
    raise problem(field, f"there is no template {source}", f"did you mean {near[0]}? Else {known}" if near else known)
