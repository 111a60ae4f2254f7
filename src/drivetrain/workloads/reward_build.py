"""Builds the model of a reward run over the language model's layers: a sequence classifier of one label, or a token
classifier of two for answers that are marked step by step."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from drivetrain.config.language import LanguageModel
from drivetrain.errors import problem
from drivetrain.models.adapters import AdapterSet
from drivetrain.models.fake_quantised import FakeQuantiser
from drivetrain.models.language_options import add_embedding_noise, freeze_all_but_last
from drivetrain.models.packed_attention import PackedAttention
from drivetrain.models.packed_scores import use_packed_scores
from drivetrain.models.swiglu import recompute_silu
from drivetrain.models.transformers_classifiers import build_classifier
from drivetrain.workloads.language_build import IMPLEMENTATIONS, fit_vocabulary
from drivetrain.workloads.language_config import FIELD, config_and_overrides
from drivetrain.workloads.language_data import LanguageReader

LABELS, STEP_LABELS = ("reward",), ("incorrect", "correct")


@dataclass(frozen=True)
class BuiltReward:
    """packed: None where each answer has a row of its own. extra: further arguments of each forward pass."""

    model: nn.Module
    packed: PackedAttention | None
    extra: dict[str, Any]
    notes: list[str]


def padding_of(tokenizer: Any) -> int:
    """Returns the token that fills rows up: the tokenizer's padding, or the one that ends texts."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    found = next((int(token) for token in known if token is not None), None)
    if found is None:
        why = "the tokenizer has neither padding nor an end of text, and a score is read before the padding"
        raise problem(f"{FIELD}.tokenizer", why, "give a tokenizer with a pad_token")
    return found


def build_reward_model(
    config: LanguageModel,
    reader: LanguageReader,
    pad: int,
    packs: bool = False,
    adapters: AdapterSet | None = None,
    fake_quantiser: FakeQuantiser | None = None,
) -> BuiltReward:
    """Builds in fp32, on the CPU. Raises UserError with everything that does not fit the tokenizer or the length."""
    options = config.model
    notes: list[str] = []
    given, overrides = config_and_overrides(options, reader.tokenizer)
    model: Any = build_classifier(
        config.auto_class,
        options.path,
        given,
        STEP_LABELS if config.samples == "steps" else LABELS,
        FIELD,
        notes.append,
        overrides,
        options.trust_remote_code,
        adapters,
    )
    fit_vocabulary(model, config, reader, notes, 0 if adapters is None else adapters.positions)
    model.config.pad_token_id = pad  # by which Transformers, too, finds an answer's last token
    if options.train_last_blocks is not None:
        trained = freeze_all_but_last(model, options.train_last_blocks)
        for name, parameter in model.named_parameters():
            if name.startswith(("score.", "classifier.")):  # starts at random
                parameter.requires_grad_(True)
                trained += parameter.numel()
        notes.append(f"{trained:,} parameters are trained: the last {options.train_last_blocks} blocks and the score")
    dropout = getattr(model, "dropout", None)
    if isinstance(dropout, nn.Dropout) and getattr(model.config, "classifier_dropout", None) is None:
        dropout.p = 0.0  # a token classifier's own 0.1, which no config chose
    if options.neftune_alpha is not None:
        add_embedding_noise(model, options.neftune_alpha)
    virtual = adapters is not None and bool(adapters.positions)
    packed = use_packed_scores(model, options.attention, notes.append) if packs and not virtual else None
    if packed is None and options.attention != "auto":
        model.set_attn_implementation(IMPLEMENTATIONS[options.attention])
    accepted = inspect.signature(model.forward).parameters.keys()
    if fake_quantiser is not None:
        fake_quantiser.prepare(model)
    if adapters is not None:
        model = adapters.fit(model)
    recompute_silu(model)
    return BuiltReward(model, packed, {"use_cache": False} if "use_cache" in accepted else {}, notes)
