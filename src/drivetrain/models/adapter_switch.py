"""Chooses which of the adapters in a model are active: for requests that each want other ones."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from drivetrain.models.adapters import KEPT, PEFTS_OWN


class AdapterSwitch:
    """Switches a model that holds adapters in its layers (`adapters.AdapterSet`). names: of all of them."""

    def __init__(self, model: nn.Module) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        self._names = {id(layer): frozenset(layer._get_available_adapters()) for layer in self._layers}
        self.names = frozenset[str]().union(*self._names.values())
        self._active: frozenset[str] | None = None  # None: not chosen yet

    def choose(self, names: Collection[str]) -> None:
        """Makes these adapters the only active ones; none of them: the model runs as its base does."""
        wanted = frozenset(names)
        if wanted == self._active:
            return
        for layer in self._layers:
            own = sorted(wanted & self._names[id(layer)])
            layer.enable_adapters(bool(own))
            if own:
                layer.set_adapter(own)
        self._active = wanted


def trained_whole(model: nn.Module) -> list[str]:
    """Returns the trained weights that belong to no adapter: a model without its adapters has them still."""
    kept = getattr(model, KEPT, frozenset[str]())
    return sorted(name for name in kept if not any(part.startswith(PEFTS_OWN) for part in name.split(".")))
