"""The model of a language-model run: built, fitted to its tokenizer, with the options of its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from drivetrain.config.language import LanguageModel
from drivetrain.errors import Problem, UserError, problem
from drivetrain.models.language_head import TargetHead
from drivetrain.models.language_options import (
    add_embedding_noise,
    attention_choices,
    context_length,
    freeze_all_but_last,
    rope_scaling_config,
)
from drivetrain.models.packed_attention import PackedAttention, use_packed_attention
from drivetrain.models.transformers_classifiers import build_classifier, config_accepts, config_of
from drivetrain.workloads.language_data import LanguageReader

FIELD = "workload.model"
IMPLEMENTATIONS = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2", "flex": "flex_attention"}


@dataclass(frozen=True)
class Built:
    """packed: None where the samples of a batch are padded."""

    model: nn.Module
    head: TargetHead
    packed: PackedAttention | None
    notes: list[str]


def build_language_model(config: LanguageModel, reader: LanguageReader, packs: bool) -> Built:
    """In fp32, on the CPU. UserError with all that does not fit the tokenizer or the length."""
    options = config.model
    notes: list[str] = []
    given = None if options.config is None else _completed(options.config, reader.tokenizer)
    overrides = {}
    if options.rope_scaling is not None:
        overrides = rope_scaling_config(config_of(options.path, given, FIELD), options.rope_scaling)
        given = None if given is None else {**given, **overrides}
    model = build_classifier("AutoModelForCausalLM", options.path, given, (), FIELD, notes.append, overrides)
    _fit(model, config, reader)
    if options.train_last_blocks is not None:
        trained = freeze_all_but_last(model, options.train_last_blocks)
        notes.append(f"{trained:,} parameters are trained, those of the last {options.train_last_blocks} blocks")
    if options.neftune_alpha is not None:
        add_embedding_noise(model, options.neftune_alpha)
    packed = _attend(model, options.attention, packs, notes)
    head = TargetHead(model, options.fused_loss)
    if options.fused_loss and head.fallback is not None:
        notes.append(f"workload.model.fused_loss: {head.fallback}")
    return Built(model, head, packed, notes)


def _attend(model: Any, choice: str, packs: bool, notes: list[str]) -> PackedAttention | None:
    """The attention of the config's choice; packed where it can be."""
    kernels = attention_choices()
    if choice != "auto" and (reason := kernels[choice]) is not None:
        known = ", ".join(name for name, missing in kernels.items() if missing is None)
        raise problem(f"{FIELD}.attention", f"{choice} was given, but {reason}", f"works here: {known}")
    packed = use_packed_attention(model, choice, warn=notes.append) if packs else None
    if packed is None and choice != "auto":
        model.set_attn_implementation(IMPLEMENTATIONS[choice])
    return packed


def _completed(given: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The run file's config, with what follows from the tokenizer where it is left out. Not its padding token: the
    embedding would not learn it, and it often ends texts as well."""
    derived = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return {**{key: value for key, value in derived.items() if config_accepts(given, key)}, **given}


def _fit(model: Any, config: LanguageModel, reader: LanguageReader) -> None:
    problems = []
    known, tokens = model.get_input_embeddings().num_embeddings, len(reader.tokenizer)
    if known < tokens and config.model.resize_vocabulary:
        model.resize_token_embeddings(tokens)
    elif known < tokens:
        added = f", {', '.join(reader.added_tokens)} of the template among them" if reader.added_tokens else ""
        why = f"vocab_size ({known}) < the tokenizer's tokens ({tokens}{added})"
        fix = "leave vocab_size out, give the model's own tokenizer, or workload.model.resize_vocabulary=true"
        problems.append(Problem(FIELD, why, fix))
    places, length = context_length(model.config), config.data.length
    if places is not None and length > places:
        why = f"length ({length}) > the model's context ({places}; max_position_embeddings)"
        problems.append(Problem("workload.data.length", why, "shorten it, or give workload.model.rope_scaling"))
    if problems:
        raise UserError(problems)
