"""Runs a model with adapters as its base: what was put beside its layers has no effect for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from drivetrain.models.language_options import evaluating


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """While the block runs, LoRA, OFT and IA3 layers compute what they compute without their adapters, without gradient
    and without dropout.

    PEFT's own `disable_adapter` also stops the adapters' parameters from requiring gradients, which engines that
    shard or reduce them have planned for; here only the flag changes that a layer's forward pass reads.

    model: wrapped by any engine.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    assert layers, "a model without adapter layers has nothing to put off"
    with torch.no_grad(), evaluating(model):
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False
