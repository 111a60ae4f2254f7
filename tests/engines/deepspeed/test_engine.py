"""The model as DeepSpeed gets it; its training is compared in tests/parity."""

from __future__ import annotations

import torch
from torch import nn

from drivetrain.engines.deepspeed.engine import InAutocast


def test_the_model_computes_under_autocast_and_keeps_its_parameters() -> None:
    plain = nn.Linear(3, 2)
    wrapped, x = InAutocast(plain, lambda: torch.autocast("cpu", torch.bfloat16)), torch.randn(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x)
    assert wrapped(x).dtype == torch.bfloat16
    assert torch.equal(wrapped(x), expected)
    assert all(mine is theirs for mine, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True))
