"""Merges adapters into the weights they adapt."""

from __future__ import annotations

from torch import nn

from drivetrain.models.quantised_linear import QuantisedLinear


def merged(model: nn.Module) -> nn.Module:
    """Returns the model with the work of LoRA's, OFT's and IA3's layers in its weights, in place: its class and names
    are those of its base. Layers whose weights are codes become plain ones, with the numbers that the codes stand for.
    Prompts and prefixes, which are no part of any weight, stay."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, QuantisedLinear):
            _put(model, name, module.plain())
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            _put(model, name, module.get_base_layer())
    return model


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def is_whole(model: nn.Module) -> bool:
    """Returns whether nothing is left beside the weights: PEFT wraps a model with prompts in a class of its own."""
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)
