"""Looks whether the tokenizer of an imported run has a chat template, where it is a folder here."""

from __future__ import annotations

from pathlib import Path

from drivetrain.config.model_files import lacks_template
from drivetrain.config.run import RunConfig


def missing_template(run: RunConfig) -> str | None:
    """Returns what the run file lacks if its conversations have no template: neither it names one, nor does the folder
    of its tokenizer have one. None where there is one, or the folder is not here."""
    owner = run.workload.template_owner
    folder = Path(owner or "").expanduser()
    if owner is None or not lacks_template(folder):
        return None
    return (
        f"workload.data.template (the tokenizer in {folder} has no chat template, as those of base models have none: "
        "give the path of the chat_template.jinja that the Instruct model of its family has, or one of alpaca, chatml, "
        "vicuna, plain)"
    )
