"""Computes products of linear layers in 8-bit floats, through torchao.float8; all else as under bf16-mixed.

Micikevicius et al. 2022, "FP8 Formats for Deep Learning": weights and inputs as e4m3, gradients of outputs as e5m2,
each tensor multiplied by a scale that brings its largest number to the format's largest. Scales are taken anew from the
tensor at hand (dynamic, tensorwise), so that there is no state to save; sums are in fp32. Parameters stay as they were.

The tensor at hand is a rank's micro-batch: in another cut a batch has other scales, and results differ by the rounding
of 8 bits, which is more than the effect of the order of sums.
"""

from __future__ import annotations

from importlib.util import find_spec

from torch import nn

from drivetrain.errors import problem
from drivetrain.models.adapter_configs import head_modules, output_layer_names
from drivetrain.models.linear_layers import plain_layers
from drivetrain.runtime.library_messages import hush

SIDE = 16  # the kernels take sides that are multiples of it


def check_installed() -> None:
    """Raises UserError without torchao."""
    if find_spec("torchao") is None:
        raise problem("precision", "fp8 needs torchao, which is not installed", "pip install 'drivetrain[lowbit]'")


def replace_layers(model: nn.Module) -> nn.Module:
    """Returns the model with 8-bit products, as an engine asks a precision's layers for it (`Precision.layers`)."""
    return compute_in_fp8(model)


def compute_in_fp8(model: nn.Module, emulate: bool = False) -> nn.Module:
    """Replaces the linear layers in place, around their own parameters. Returns the model. Raises UserError if none can
    be replaced.

    Some layers stay: the head, and layers whose sides are no multiples of 16 (adapters of a low rank among them). A
    batch's tokens may be any number: products over them are padded. emulate: in fp32, from the same 8-bit numbers.
    """
    hush()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layers = plain_layers(model, [*output_layer_names(model), *head_modules(model)])
    fitting = {name for names in layers if _fits(model.get_submodule(names[0])) for name in names}
    if not fitting:
        why = f"{type(model).__name__} has no linear layers beside its head with sides that are multiples of {SIDE}"
        raise problem("precision", f"{why}, as products in 8 bits need them", "give bf16-mixed")
    config = Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    made: nn.Module = convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in fitting)
    return made


def description(model: nn.Module) -> str:
    """Returns how many layers compute in 8 bits, and how many do not."""
    from torchao.float8.float8_linear import Float8Linear

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    converted = sum(isinstance(module, Float8Linear) for module in layers)
    odd = sum(not isinstance(module, Float8Linear) and not _fits(module) for module in layers)
    stay = f"; {odd} have sides that are no multiples of {SIDE}" if odd else ""
    return f"{converted} of {len(layers)} in fp8{stay}"


def _fits(linear: nn.Module) -> bool:
    assert isinstance(linear, nn.Linear)
    return linear.in_features % SIDE == 0 and linear.out_features % SIDE == 0
