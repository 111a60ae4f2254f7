"""Answers libraries that look at their own numbers while a run is traced without any.

DeepSpeed asks whether the gradient norm is finite, PyTorch's gradient scaler whether a step overflowed. The answer is
0: finite, and no overflow. PyTorch's pipelines ask whether all stages know the shapes that they receive: 1, as they do.
Frozen models beside the trained one have a fingerprint taken of their weights, which no plan looks at: 0. Tensor ranks
draw the seed of masks that differ: 0, as good as any.
Code of a model gets no answer: what it computes next would depend on it.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

ANSWERS = {  # by a part of the asking file's name
    f"{os.sep}deepspeed{os.sep}": 0,
    os.path.join("torch", "amp", "grad_scaler.py"): 0,
    os.path.join("drivetrain", "engines", "auxiliary.py"): 0,
    os.path.join("drivetrain", "engines", "mesh", "dropout_masks.py"): 0,
    os.path.join("torch", "distributed", "pipelining", "schedules.py"): 1,
}
BETWEEN = (f"{os.sep}torch{os.sep}", f"drivetrain{os.sep}measure", f"drivetrain{os.sep}plan")


def answer_to_library(dtype: torch.dtype) -> float | int | bool | None:
    """Returns the number that stands for a tensor's of this type; None where other code than a library's asked."""
    answer = _answer()
    return None if answer is None else _of(dtype, answer)


def _of(dtype: torch.dtype, answer: int) -> float | int | bool:
    return float(answer) if dtype.is_floating_point else bool(answer) if dtype is torch.bool else answer


def _answer() -> int | None:
    """Returns the answer to the library that asked; None where other code outside of torch did."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        for part, answer in ANSWERS.items():
            if part in name:
                return answer
        if not any(part in name for part in BETWEEN):
            return None
        frame = frame.f_back
    return None
