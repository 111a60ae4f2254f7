"""Quantisation-aware training, with torchao's fake-quantised linear layers.

Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference": the
forward pass rounds weights (and inputs) to the quantised model's values, with scales computed anew each time; the
backward pass treats the rounding as the identity. The weights themselves stay whole, under their names: a checkpoint is
a plain model's. Evaluation rounds too, so it measures the quantised model.

Adapters come on top of such a base, and are not rounded: in the end the base is quantised and they are not.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.config.quantisation_aware import FIELD, QuantisationAware
from drivetrain.errors import problem
from drivetrain.models.adapter_configs import head_modules, output_layer_names
from drivetrain.models.linear_layers import check_groups, plain_layers, replace
from drivetrain.runtime.library_messages import hush

FILE = "quantisation_aware.json"


class FakeQuantiser:
    """Prepares each model that is built."""

    def __init__(self, config: QuantisationAware) -> None:
        """Raises UserError without torchao."""
        if find_spec("torchao") is None:
            raise problem(FIELD, "it needs torchao, which is not installed", "pip install 'drivetrain[lowbit]'")
        self._config = config

    def prepare(self, model: nn.Module) -> None:
        """Replaces all linear layers but the head, in place; before adapters, which then wrap them. Raises UserError if
        there are none, or rows are no whole number of groups."""
        layers = plain_layers(model, [*output_layer_names(model), *head_modules(model)])
        if not layers:
            raise problem(FIELD, f"{type(model).__name__} has no linear layers beside its head", "leave it out")
        if self._config.format != "int8-weight":
            check_groups(model, layers, self._config.group_size, FIELD)
        for names in layers:
            replace(model, names, self._made)

    def _made(self, linear: nn.Linear) -> nn.Linear:
        """Makes a layer around the same parameters: torchao's own way draws new ones, even on the meta device."""
        hush()
        from torchao.quantization.qat import FakeQuantizedLinear

        inputs, weights = _configs(self._config)
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        made: nn.Linear = FakeQuantizedLinear(*sizes, inputs, weights, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        return made

    def description(self, model: nn.Module) -> str:
        """Returns the run's remark about it."""
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        return f"{len(_prepared(model))} of {len(layers)} fake-quantised ({self._config.format})"

    def write(self, model: nn.Module, folder: Path) -> None:
        """Writes beside the weights for which format they were trained, and which layers the model without adapters
        has."""
        described = {**self._config.model_dump(), "layers": _prepared(model)}
        (folder / FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _prepared(model: nn.Module) -> list[str]:
    from torchao.quantization.qat import FakeQuantizedLinear

    named = [name for name, module in model.named_modules() if isinstance(module, FakeQuantizedLinear)]
    return [name.removesuffix(".base_layer").removeprefix("base_model.") for name in named]


def _configs(config: QuantisationAware) -> tuple[Any, Any]:
    """Returns torchao's configs of inputs and weights, as it infers them from the format's own config. A scale has the
    weights' dtype, which is torchao's default: as in the conversion."""
    from torchao.quantization.qat import IntxFakeQuantizeConfig

    if config.format == "int8-weight":
        return None, IntxFakeQuantizeConfig(torch.int8, "per_channel", scale_precision=None)
    weights = IntxFakeQuantizeConfig(
        torch.int4,  # type: ignore[attr-defined]  # torch's stubs lack it
        group_size=config.group_size,
        scale_precision=None,
    )
    if config.format == "int4-weight":
        return None, weights
    return IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False, scale_precision=None), weights
