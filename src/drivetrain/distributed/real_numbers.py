"""Tensors that hold numbers, also while a run is only traced with tensors that hold none (FakeTensorMode)."""

from __future__ import annotations

from contextlib import AbstractContextManager


def real_numbers() -> AbstractContextManager[object]:
    """Returns a context whose tensors are real: the numbers of ranks that a device mesh is made of, for example."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily  # brings half of dynamo along

    return unset_fake_temporarily()
