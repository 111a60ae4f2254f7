"""Builds the model of a language-model run, fits it to its tokenizer, and applies the options of its config."""

from __future__ import annotations

import inspect
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.config.language import LanguageModel
from drivetrain.errors import Problem, UserError, problem
from drivetrain.models.adapters import AdapterSet
from drivetrain.models.block_expansion import add_blocks
from drivetrain.models.fake_quantised import FakeQuantiser
from drivetrain.models.language_head import TargetHead
from drivetrain.models.language_options import (
    add_embedding_noise,
    attention_choices,
    context_length,
    evaluating,
    freeze_all_but_last,
    is_scaled_dynamically,
)
from drivetrain.models.packed_attention import PackedAttention, use_packed_attention
from drivetrain.models.swiglu import recompute_silu
from drivetrain.models.transformers_classifiers import build_classifier
from drivetrain.workloads.language_config import FIELD, config_and_overrides
from drivetrain.workloads.language_data import LanguageReader
from drivetrain.workloads.language_tokenizer import num_ids

IMPLEMENTATIONS = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2", "flex": "flex_attention"}


@dataclass(frozen=True)
class Built:
    """packed: None where the samples of a batch are padded. takes_positions: whether its own are 0, 1, 2, ... accepted:
    what its forward takes."""

    model: nn.Module
    head: TargetHead
    packed: PackedAttention | None
    takes_positions: bool
    accepted: Set[str]
    notes: list[str]


@dataclass(frozen=True)
class Inputs:
    """Holds what a model's forward gets: tensors of the batch by their names, and other arguments."""

    tensors: Set[str]
    extra: dict[str, Any]

    def of(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {**{name: batch[name] for name in self.tensors}, **self.extra}


def inputs_of(built: Built) -> Inputs:
    given = {"input_ids", "position_ids"} if built.takes_positions else {"input_ids"}
    return Inputs(given & built.accepted, {"use_cache": False} if "use_cache" in built.accepted else {})


def build_language_model(
    config: LanguageModel,
    reader: LanguageReader,
    packs: bool,
    adapters: AdapterSet | None = None,
    fake_quantiser: FakeQuantiser | None = None,
    field: str = FIELD,
) -> Built:
    """Builds in fp32, on the CPU. Raises UserError with everything that does not fit the tokenizer or the length.
    field: of the model's block in the run file, which problems name."""
    options = config.model
    notes: list[str] = []
    given, overrides = config_and_overrides(options, reader.tokenizer)
    model = build_classifier(
        "AutoModelForCausalLM",
        options.path,
        given,
        (),
        field,
        notes.append,
        overrides,
        options.trust_remote_code,
        adapters,
    )
    virtual = 0 if adapters is None else adapters.positions
    fit_vocabulary(model, config, reader, notes, virtual, field)
    if options.add_blocks is not None:
        trained = add_blocks(model, options.add_blocks)
        notes.append(f"{trained:,} parameters are trained, those of {options.add_blocks} added blocks")
    if options.train_last_blocks is not None:
        trained = freeze_all_but_last(model, options.train_last_blocks)
        notes.append(f"{trained:,} parameters are trained, those of the last {options.train_last_blocks} blocks")
    if options.neftune_alpha is not None:
        add_embedding_noise(model, options.neftune_alpha)
    takes_positions = _check_it_looks_back(model, field)
    if packs and not takes_positions:
        notes.append(f"{type(model).__name__} counts positions in its own way: samples are padded, not packed")
    if packs and virtual:
        notes.append("virtual tokens stand before each sample: samples are padded, not packed")
    packed = _attend(model, options.attention, packs and takes_positions and not virtual, notes)
    accepted = inspect.signature(model.forward).parameters.keys()
    if fake_quantiser is not None:
        fake_quantiser.prepare(model)
    if adapters is not None:
        model = adapters.fit(model)
    recompute_silu(model)
    head = TargetHead(model, options.fused_loss, 0 if adapters is None else adapters.in_hidden_states)
    if options.fused_loss and head.fallback is not None:
        notes.append(f"workload.model.fused_loss={str(options.fused_loss).lower()}: {head.fallback}")
    return Built(model, head, packed, takes_positions and not virtual, accepted, notes)


def _attend(model: Any, choice: str, packs: bool, notes: list[str]) -> PackedAttention | None:
    """Sets the attention of the config's choice; packed if possible."""
    kernels = attention_choices()
    if choice != "auto" and (reason := kernels[choice]) is not None:
        known = ", ".join(name for name, missing in kernels.items() if missing is None)
        raise problem(f"{FIELD}.attention", f"{choice} was given, but {reason}", f"works here: {known}")
    used = None
    if packs:
        used = use_packed_attention(model, choice, warn=notes.append)
    elif choice == "auto" and getattr(model.config, "_attn_implementation", None) == "sdpa":
        used = use_packed_attention(model, choice, lambda _: None, several=False)
    if used is None and choice != "auto":
        model.set_attn_implementation(IMPLEMENTATIONS[choice])
    return used if packs else None


def fit_vocabulary(
    model: Any, config: LanguageModel, reader: LanguageReader, notes: list[str], virtual: int, field: str = FIELD
) -> None:
    """Checks the fit. virtual: tokens that adapters put before each sample. field: of the model's block."""
    problems = []
    known, tokens = model.get_input_embeddings().num_embeddings, num_ids(reader.tokenizer)
    if known < tokens and config.model.resize_vocabulary:
        # new rows follow the others' mean, which a model without numbers does not have
        model.resize_token_embeddings(tokens, mean_resizing=not next(model.parameters()).is_meta)
        if config.model.train_last_blocks is not None:
            new = tokens - known
            notes.append(f"{new} rows are added to the embedding, and stay as they are: only last blocks are trained")
    elif known < tokens:
        added = f", {', '.join(reader.added_tokens)} of the template among them" if reader.added_tokens else ""
        why = f"vocab_size ({known}) < the tokenizer's tokens ({tokens}{added})"
        fix = "leave vocab_size out, give the model's own tokenizer, or workload.model.resize_vocabulary=true"
        problems.append(Problem(field, why, fix))
    places, length = context_length(model.config), config.data.length
    if places is not None and length + virtual > places:
        more = f" + {virtual} virtual tokens" if virtual else ""
        why = f"length ({length}{more}) > the {field.rpartition('.')[2]}'s context ({places}; max_position_embeddings)"
        fix = "shorten it, or give workload.model.rope_scaling"
        if is_scaled_dynamically(model.config):
            why += ", beyond which dynamic scaling follows the longest sequence so far"
            fix += " of type linear, yarn or llama3"
        problems.append(Problem("workload.data.length", why, fix))
    if problems:
        raise UserError(problems)


@torch.no_grad()
def _check_it_looks_back(model: Any, field: str) -> bool:
    """Raises UserError if a position sees those after it: its target is one of them, and padding would count.

    Returns whether its own positions are 0, 1, 2, ...; RoBERTa's and its like begin elsewhere.
    """
    parameter, name = next(model.parameters()), type(model).__name__
    if parameter.is_meta:  # the rank that has the weights looks
        return True
    accepted = inspect.signature(model.forward).parameters
    extra = {"use_cache": False} if "use_cache" in accepted else {}
    known = model.get_input_embeddings().num_embeddings
    ids = torch.randint(known, (1, 5), generator=torch.Generator().manual_seed(0)).to(parameter.device)
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % known
    with evaluating(model):
        logits, changed = model(input_ids=torch.cat([ids, other]), **extra).logits.split(1)  # weights are read once
        if _differ(logits[:, :-1], changed[:, :-1]):
            fix = "give is_decoder: true in its config, if it has that, or another model"
            raise problem(field, f"{name} sees the tokens that it is to predict", fix)
        if "position_ids" not in accepted:
            return True
        placed = model(input_ids=ids, position_ids=torch.arange(5, device=ids.device)[None], **extra).logits
    return not _differ(logits, placed)


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not torch.allclose(one, other, rtol=0, atol=1e-4 * float(one.abs().max()))
