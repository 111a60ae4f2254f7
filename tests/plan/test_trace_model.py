"""Tests that tensors without numbers lie in memory as those of PyTorch's kernels do."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from drivetrain.plan.trace_model import CachedFakeMode


@pytest.mark.parametrize("size", [(8, 6, 1, 1), (8, 6, 4, 4), (8, 1, 5, 5), (2, 6, 1, 3)])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)])  # from the slowest to the quickest dimension
def test_what_follows_batch_norm_lies_as_a_cpus_kernel_puts_it(size: tuple[int, ...], order: tuple[int, ...]) -> None:
    given = torch.empty_permuted(size, order).normal_()
    real = F.batch_norm(given, None, None, training=True)
    mode = CachedFakeMode(like_cpu=True, allow_non_fake_inputs=True)
    with mode:
        fake = F.batch_norm(mode.from_tensor(given), None, None, training=True)
    assert fake.stride() == real.stride()
