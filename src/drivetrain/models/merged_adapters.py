"""Merges adapters into the weights they adapt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn


def merged(model: nn.Module) -> nn.Module:
    """Returns the model with the products of LoRA's and IA3's layers in its weights, in place: its class and names are
    those of its base. Prompts and prefixes, which are no part of any weight, stay."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, module.get_base_layer())
    return model


def is_whole(model: nn.Module) -> bool:
    """Returns whether nothing is left beside the weights: PEFT wraps a model with prompts in a class of its own."""
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def save_whole(model: Any, folder: Path) -> None:
    """Writes a merged model as Transformers does, with the tokenizer and its chat template where it has one."""
    tokenizer = vars(model).get("tokenizer")
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
