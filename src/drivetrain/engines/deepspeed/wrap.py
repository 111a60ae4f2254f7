"""Wraps a model in a DeepSpeedEngine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from drivetrain.errors import problem
from drivetrain.memory.recompute import beside_selective
from drivetrain.optim.optimizers import plainly


class InAutocast(nn.Module):
    """The model with its forward in autocast: DeepSpeed's engine switches off an autocast that is opened around it."""

    def __init__(self, model: nn.Module, context: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self.model = model
        self._context = context

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._context():
            return self.model(*args, **kwargs)


def wrap_deepspeed(model: nn.Module, optimizer: torch.optim.Optimizer | None, json: dict[str, Any]) -> Any:
    """Returns a DeepSpeedEngine; the process group is joined already. The model's parameters keep their names."""
    import deepspeed

    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=json, dist_init_required=False)
    except (ValueError, AssertionError) as error:  # pydantic's among them: values that only DeepSpeed checks
        raise problem("engine.config", f"DeepSpeed refuses it: {error}", "correct the key that it names") from error
    shards = getattr(engine.optimizer, "parameter_offload", None)  # at stage 3, with an optimizer
    for name in ("pre_sub_module_forward_function", "post_sub_module_forward_function") if shards is not None else ():
        setattr(shards, name, beside_selective(getattr(shards, name)))
    return engine


def without_fused_sgd(
    cls: type[torch.optim.Optimizer], groups: list[dict[str, Any]], arguments: dict[str, Any]
) -> torch.optim.Optimizer:
    """Switches torch's fused SGD off: it needs its momentum before the first step, and ZeRO's partitions come later."""
    if cls is torch.optim.SGD:
        arguments = {key: value for key, value in arguments.items() if key != "fused"}
    return plainly(cls, groups, arguments)
