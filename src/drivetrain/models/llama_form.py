"""Models whose blocks have Llama's form (Touvron et al. 2023, "LLaMA"), in Transformers' own code."""

from __future__ import annotations

from typing import Any

from torch import nn

FORM = ("llama", "mistral", "qwen2", "qwen3")  # Transformers' models with Llama's blocks
MODULES = frozenset(f"transformers.models.{name}.modeling_{name}" for name in FORM)


def of_llamas_form(module: nn.Module) -> bool:
    """Returns whether it is a module of Transformers' own code for a model with Llama's blocks."""
    return type(module).__module__ in MODULES


def last_block(model: nn.Module) -> Any:
    """Returns the last block of a model, however it is wrapped; None where its blocks have another form."""
    blocks = [each for each in model.modules() if of_llamas_form(each) and {"self_attn", "mlp"} <= each._modules.keys()]
    return blocks[-1] if blocks else None
