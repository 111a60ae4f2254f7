"""Decides whether answers to one prompt may share its forward pass (`data.branches`): the one place that says so."""

from __future__ import annotations

from typing import Any

from drivetrain.config.language import LanguageModel
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError
from drivetrain.models.model_folders import config_of
from drivetrain.workloads.language_config import FIELD, config_and_overrides


def why_not_shared(run: RunConfig, machine: Machine, tokenizer: Any) -> str | None:
    """Returns the reason that answers do not share their prompt; None where they do, and every step is the same.

    Rows have to be packed, which engines that need each sample in a row of its own rule out (`needs_rows`).
    """
    config = run.workload
    if not isinstance(config, LanguageModel) or not config.has_alternatives:
        return "a sample has one answer"
    if not config.is_packed:
        return "samples are not packed"
    if machine.device != "cpu":
        return "attention of answers that share a prompt is there for CPUs alone"
    if config.model.neftune_alpha is not None:
        return "noise on embeddings depends on the length of each sequence"
    if any(adapter.dropout for adapter in run.adapter or ()):
        return "adapters drop out at random"
    other = config.held_to.reference_model.path
    paths = [config.model.path, *([] if other is None else [other])]
    return next((why for path in paths if (why := _why_not_by_config(config, path, tokenizer)) is not None), None)


def _why_not_by_config(config: LanguageModel, path: str | None, tokenizer: Any) -> str | None:
    options = config.model
    try:
        given = config_and_overrides(options, tokenizer)[0] if path == options.path else None
        known: Any = config_of(path, given, FIELD, options.trust_remote_code).get_text_config()
    except UserError:
        return "the model's config has problems"  # which building the model reports
    drops = [name for name, value in known.to_dict().items() if "drop" in name and isinstance(value, float) and value]
    if drops:
        return f"the model drops out at random ({', '.join(drops)})"
    window = getattr(known, "sliding_window", None) if getattr(known, "use_sliding_window", True) else None
    if window is not None and window < config.longest:
        return f"attention has a window of {window} positions"
    if getattr(known, "v_head_dim", None) is not None:
        return "keys and values differ in width"
    return None
