"""Describes a sample, to help find a faulty one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

LONGEST = 120  # characters of what is no tensor


def in_words(sample: Any) -> str:
    """Returns types, shapes and ranges of its tensors, and other values unchanged."""
    if isinstance(sample, Mapping):
        return ", ".join(f"{name}: {in_words(value)}" for name, value in sample.items())
    if isinstance(sample, list | tuple):
        return ", ".join(map(in_words, sample))
    if isinstance(sample, np.ndarray):
        return in_words(torch.tensor(sample)) if sample.dtype.kind in "biuf" else _cut(sample)
    return _tensor(sample) if isinstance(sample, Tensor) and not sample.is_complex() else _cut(sample)


def _tensor(tensor: Tensor) -> str:
    if tensor.dim() == 0:
        return str(tensor.item())
    values = tensor.double()
    finite = values[values.isfinite()]
    extent = f" from {finite.min():.4g} to {finite.max():.4g}" if finite.numel() else ""
    bad = values.numel() - finite.numel()
    shape = " x ".join(map(str, tensor.shape))
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {shape}{extent}" + (f", {bad} of {values.numel()} not finite" if bad else "")


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
