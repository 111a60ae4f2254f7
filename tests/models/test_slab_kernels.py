"""Kernels of the fused loss beside PyTorch's operators: on a GPU, and elsewhere by Triton's interpreter, in a process
of its own, which reads its variable as it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.device import chosen_device

ROOT = Path(__file__).resolve().parents[2]
ROWS, VOCABULARY, SLAB = 9, 331, 150  # the last slab is narrower, and no multiple of a kernel's block


@pytest.mark.usefixtures("on_device")
def test_each_kernel_gives_what_pytorchs_operators_give() -> None:
    if chosen_device() == "cuda":
        check("cuda")
        return
    if find_spec("triton") is None:
        pytest.skip("no triton: neither a GPU nor its interpreter runs the kernels")
    words = [sys.executable, "-c", "from tests.models.test_slab_kernels import check; check('cpu')"]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, sys.path)])
    found = subprocess.run(
        words,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr


def check(device: str) -> None:
    from drivetrain.models import slab_kernels

    slab_kernels.BLOCK = 64
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
        _check_dtype(device, dtype, near)


def _check_dtype(device: str, dtype: torch.dtype, near: float) -> None:
    from drivetrain.models.slab_kernels import changes, see

    torch.manual_seed(0)
    logits = (4 * torch.randn(ROWS, VOCABULARY)).to(device, dtype)
    logits[1, :SLAB] = -torch.inf  # the first slab of a row has no token that may follow
    logits[2, 7] = torch.nan
    targets = torch.randint(SLAB, VOCABULARY, (ROWS,), device=device)
    targets[3], targets[4] = -100, VOCABULARY  # ignored, and no token
    targets[5], targets[6] = SLAB - 1, SLAB  # at the edge of slabs
    log_sum = torch.full((ROWS,), -torch.inf, device=device)
    at_target, best, argmax = log_sum * torch.nan, log_sum.clone(), torch.zeros_like(targets)
    alone = log_sum.clone()
    for start in range(0, VOCABULARY, SLAB):
        slab = logits[:, start : start + SLAB].contiguous()
        see(slab, start, targets, log_sum, at_target, (best, argmax))
        see(slab, start, targets, alone, at_target, None)
    numbers = logits.float()
    torch.testing.assert_close(log_sum, numbers.logsumexp(1), equal_nan=True, rtol=1e-6, atol=1e-6)
    assert torch.equal(log_sum.nan_to_num(), alone.nan_to_num())
    known = torch.tensor([place for place in range(ROWS) if place not in (3, 4)], device=device)
    torch.testing.assert_close(at_target[known], numbers[known, targets[known]], rtol=0, atol=0)
    assert at_target[3:5].isnan().all()
    real = torch.tensor([place for place in range(ROWS) if place != 2], device=device)  # of rows without a NaN
    assert torch.equal(argmax[real], numbers[real].argmax(1))
    factor = torch.rand(ROWS, device=device)
    factor[3] = 0
    expected = (numbers.softmax(1) - _one_hot(targets)) * factor[:, None]
    for start in range(0, VOCABULARY, SLAB):
        slab = logits[:, start : start + SLAB].contiguous()
        own, apart = expected[:, start : start + SLAB], torch.empty_like(slab)
        changes(slab, start, targets, log_sum, factor, into=apart)
        changes(slab, start, targets, log_sum, factor, into=slab)
        torch.testing.assert_close(slab.float(), own, equal_nan=True, rtol=near, atol=1e-6)
        assert torch.equal(apart.nan_to_num(), slab.nan_to_num())


def _one_hot(targets: Tensor) -> Tensor:
    known = (targets >= 0) & (targets < VOCABULARY)
    return F.one_hot(targets.where(known, 0), VOCABULARY) * known[:, None]
