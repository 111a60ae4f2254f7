"""Quantises a frozen base while its files are read: no more than one of its linear weights is in memory in fp32 at a
time.

A base that is loaded whole and then quantised takes eight times the memory of its final form. Transformers lets a
quantiser work on each weight once it has been read, renamed and cast to fp32; the codes and scales made there are, to
the bit, those that `quantise` makes of the whole model. Cases that this way does not cover (a folder that lacks
weights, or holds some of another shape, or not finite ones) are left to `quantise`, which reports them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from drivetrain.config.quantised import QuantisedBase
from drivetrain.models.quantised_base import quantise
from drivetrain.models.quantised_linear import QuantisedLinear

METHOD = "drivetrain"


class Streaming(QuantizationConfigMixin):
    """A quantization_config for `from_pretrained`; for one load.

    Attributes:
        seen: name of each weight that was quantised → result of `look` on it before.
    """

    def __init__(
        self,
        config: QuantisedBase,
        skip: Callable[[nn.Module], Collection[str]],
        look: Callable[[str, Tensor], bytes],
    ) -> None:
        """skip: names of modules that stay as they are, of the model without numbers. look: called with each weight's
        name and itself, (out, in) in fp32, before it is quantised."""
        self.quant_method = METHOD
        self.config, self.skip, self.look = config, skip, look
        self.layers: dict[str, QuantisedLinear] = {}
        self.seen: dict[str, bytes] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Streaming:
        """Transformers copies a model's config, of which this is a part during loading."""
        del memo
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": METHOD}

    @property
    def is_complete(self) -> bool:
        return bool(self.layers) and {f"{name}.weight" for name in self.layers} == self.seen.keys()


class _Quantiser(HfQuantizer):
    quantization_config: Streaming

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **given: Any) -> None:
        """Puts the layers, without numbers, in place of the linear ones."""
        del given
        asked = self.quantization_config
        tied = {name.rpartition(".")[0] for pair in model.all_tied_weights_keys.items() for name in pair}
        names = quantise(model, asked.config, [*asked.skip(model), *tied])
        asked.layers = {name: model.get_submodule(name) for name in names}

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **given: Any) -> bool:
        del model, given
        module, _, kind = param_name.rpartition(".")
        return kind == "weight" and module in self.quantization_config.layers

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantise(self.quantization_config)

    def postprocess_model(self, model: PreTrainedModel, **given: Any) -> None:
        """Leaves the model without a mark of quantisation: engines and PEFT know its layers."""
        del given
        self.remove_quantization_config(model)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


class _Quantise(ConversionOps):
    def __init__(self, asked: Streaming) -> None:
        self._asked = asked

    @torch.no_grad()
    def convert(self, input_dict: Mapping[str, Any], **given: Any) -> dict[str, Tensor]:
        """Converts {name: weight, or a list of one} → {name: codes, name of the scales: scales}; others are
        unchanged."""
        del given
        found: dict[str, Tensor] = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            layer = self._asked.layers.get(name.removesuffix(".weight"))
            if layer is None:
                found[name] = weight
                continue
            if weight.shape != (layer.out_features, layer.in_features) or not torch.isfinite(weight).all():
                raise ValueError(f"{name} is no weight that could be quantised")  # loaded whole, it is explained
            self._asked.seen[name] = self._asked.look(name, weight)
            codes, scales = layer.packed(weight)
            found |= {name: codes, f"{name.removesuffix('weight')}scales": scales}
        return found


if METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantizer(METHOD)(_Quantiser)
