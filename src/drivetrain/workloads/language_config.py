"""The Transformers config of a language-model run, before its model is built."""

from __future__ import annotations

from typing import Any

from drivetrain.config.language import LanguageModel
from drivetrain.config.language_model import LanguageModelModel
from drivetrain.errors import UserError
from drivetrain.models.classifier_config import config_accepts, config_problems
from drivetrain.models.language_options import context_length, rope_scaling_config
from drivetrain.models.model_folders import config_of
from drivetrain.workloads.language_tokenizer import num_ids

FIELD = "workload.model"


def context_of_model(config: LanguageModel, tokenizer: Any) -> int | None:
    """Returns the longest sequence that the model's positions are made for; None if it has no such bound, or its config
    has problems, which building the model reports."""
    options = config.model
    if options.path is None and config_problems(config.auto_class, options.config or {}, FIELD):
        return None
    try:
        given, overrides = config_and_overrides(options, tokenizer)
        known = config_of(options.path, given, FIELD, options.trust_remote_code)
    except UserError:
        return None
    places: int | None = overrides.get("max_position_embeddings", context_length(known))
    return places


def config_and_overrides(options: LanguageModelModel, tokenizer: Any) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Returns the config of a model that is made, completed from the tokenizer, and what is laid over the config of one
    that is loaded."""
    given = None if options.config is None else _completed(options.config, tokenizer)
    if options.rope_scaling is None:
        return given, {}
    known = config_of(options.path, given, FIELD, options.trust_remote_code)
    overrides = rope_scaling_config(known, options.rope_scaling)
    return None if given is None else {**given, **overrides}, overrides


def _completed(given: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Returns the run file's config, completed from the tokenizer where it leaves fields out. Not its padding token:
    the embedding would not learn it, and it often ends texts as well."""
    derived = {
        "vocab_size": num_ids(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return {**{key: value for key, value in derived.items() if config_accepts(given, key)}, **given}
