"""Finds the layers that PEFT put in place of a model's own, for engines that take layers apart."""

from __future__ import annotations

from typing import Any

from torch import nn

from drivetrain.models.adapters import KEPT


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Returns PEFT's layers by the names that the model's own had. None if the model has no adapter."""
    if getattr(model, KEPT, None) is None:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def layers_of(model: nn.Module) -> dict[str, nn.Linear | nn.Embedding]:
    """Returns the linear layers and embeddings by the model's own names; for an adapted one the layer beneath the
    adapters."""
    adapted = adapted_layers(model)
    inside = tuple(f"{name}." for name in adapted)
    found: dict[str, nn.Linear | nn.Embedding] = {}
    for name, module in model.named_modules():
        bare = adapted[name].get_base_layer() if name in adapted else module
        if isinstance(bare, nn.Linear | nn.Embedding) and not name.startswith(inside):
            found[name] = bare
    return found


def is_ia3(layer: nn.Module) -> bool:
    from peft.tuners.ia3 import IA3Layer

    return isinstance(layer, IA3Layer)


def variants(layer: Any) -> list[str]:
    """Returns what a layer computes with whole rows: DoRA, OFT. Empty for plain LoRA and IA3."""
    if hasattr(layer, "oft_R"):
        return ["OFT"]
    found = getattr(layer, "lora_variant", {}).values()
    return sorted({type(variant).__name__.removesuffix("LinearVariant").removesuffix("Variant") for variant in found})
