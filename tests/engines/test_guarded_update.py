"""Tests where the flag lies by which a fused kernel leaves an update out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain.engines.guarded_update import _beside


@pytest.mark.parametrize(("parameters_on", "flag_on"), [("cpu", "cpu"), ("meta", "cpu")])
def test_the_flag_lies_beside_the_parameters(parameters_on: str, flag_on: str) -> None:
    """Those that FSDP offloads are not on the device that decides; the meta device plays the other one."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2, device=parameters_on))], fused=False)
    assert _beside(optimizer, torch.zeros((), device=flag_on)).device.type == parameters_on
