"""Chooses which of the adapters in a model is active: for requests that each want another one."""

from __future__ import annotations

from torch import nn


class AdapterSwitch:
    """Of a model that holds several adapters in its layers (`adapters.AdapterSet`)."""

    def __init__(self, model: nn.Module) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        self._names = {id(layer): frozenset(layer._get_available_adapters()) for layer in self._layers}
        self._active: str | bool | None = False  # False: not chosen yet

    def choose(self, name: str | None) -> None:
        """Makes one adapter the only active one; None: the model runs without any."""
        if name == self._active and self._active is not False:
            return
        for layer in self._layers:
            has = name in self._names[id(layer)]
            layer.enable_adapters(has)
            if has:
                layer.set_adapter([name])
        self._active = name
