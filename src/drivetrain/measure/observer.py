"""Observes every operator of one step without changing the step.

It uses torch's dispatch modes. In three ways a mode could change what runs, or end it, which are prevented here:
torch.compile does not use compiled code under a mode, unless the mode declares that it ignores compiled code; an
operator that takes functions (FlexAttention) is an error under a mode that does not declare that it supports them; and
an error of the counting would come out of the model's forward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.ops.prim.device.default


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yields the tensors among an operator's arguments or results.

    PyTorch's own iterator over trees takes several times as long, which counts where every operator is observed.
    """
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in([*values.values()])


class Observer(TorchDispatchMode, ABC):
    """`failure` is the first error of `_observe`, after which nothing more is observed; normally None.

    Compiled code runs as compiled, unseen.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.failure: Exception | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leaves out the wrapper with which torch hides a mode's Python from torch.compile: it took a fifth of the time
        of a plan's traces, and the mode runs no compiled code of its own."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:  # which torch asks of tensors without numbers, more often than anything else
            return getattr(args[0], "fake_device", None) or func(*args)
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # sharded and quantised tensors: asked again for the plain tensors within
        kwargs = kwargs or {}
        result = self._run(func, args, kwargs)
        if self.failure is None:
            try:
                self._observe(func, args, kwargs, result)
            except Exception as error:
                self.failure = error
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    @abstractmethod
    def _observe(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Looks at one operator's inputs and result."""
