"""Answers libraries that look at their own numbers while a run is traced without any.

DeepSpeed asks whether the gradient norm is finite, PyTorch's gradient scaler whether a step overflowed. The answer is
0: finite, and no overflow. Code of a model gets no answer: what it computes next would depend on it.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

ASKING = (f"{os.sep}deepspeed{os.sep}", os.path.join("torch", "amp", "grad_scaler.py"))  # parts of their files' names
BETWEEN = (f"{os.sep}torch{os.sep}", f"drivetrain{os.sep}measure", f"drivetrain{os.sep}plan")


class OwnNumbers(TorchDispatchMode):
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten._local_scalar_dense.default and _lacks_numbers(args[0]) and _asked_by_library():
            return 0.0 if args[0].is_floating_point() else False if args[0].dtype is torch.bool else 0
        return func(*args, **(kwargs or {}))


def _lacks_numbers(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.constant is None


def _asked_by_library() -> bool:
    """Returns whether the code outside of torch that asked is a library's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in ASKING):
            return True
        if not any(part in name for part in BETWEEN):
            return False
        frame = frame.f_back
    return False
