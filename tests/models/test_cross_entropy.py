"""The loss of wide logits is torch's, with fewer tensors of their size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drivetrain.measure.memory import TensorPeak
from drivetrain.models import cross_entropy
from drivetrain.models.cross_entropy import cross_entropy_of_each, cross_entropy_sum
from tests.device import chosen_device

ROWS, TOKENS = 23, 500

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(autouse=True)
def _several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "LARGER_ON_GPU", 1)
    monkeypatch.setattr(cross_entropy, "BYTES_AT_ONCE", 5 * 4 * TOKENS)  # five rows, the last part with three


def plain(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=-100, reduction="sum")


def rows(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits = (torch.randn(ROWS, TOKENS) * 4).to(dtype)
    logits[1, 3] = 300.0  # its row's other probabilities are 0 in fp32
    targets = torch.randint(TOKENS, (ROWS,))
    targets[[0, 7]] = -100
    return logits.requires_grad_(), targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_value_and_gradient_are_torchs(dtype: torch.dtype) -> None:
    logits, targets = rows(dtype)
    upstream = torch.tensor(65536 / 7)  # as a scaled loss over a count
    ours, theirs = cross_entropy_sum(logits, targets), plain(logits, targets)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    own, other = (torch.autograd.grad(loss, logits, upstream)[0] for loss in (ours, theirs))
    assert own.dtype == dtype
    assert int((other != 0).sum()) == int((own != 0).sum()), "nothing vanishes before it is scaled"
    torch.testing.assert_close(own.float(), other.float(), rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-3)
    assert float((own.float() - other.float()).norm() / other.float().norm()) < 1e-3


def test_losses_are_added_part_by_part() -> None:
    """The order decides the last bit of a curve, which earlier curves of the same run file have too."""
    for seed in range(8):  # another order gives some of them another bit
        torch.manual_seed(seed)
        logits, targets = (torch.randn(203, TOKENS) * 4).requires_grad_(), torch.randint(TOKENS, (203,))
        expected = torch.zeros(())
        for part, own in zip(logits.detach().split(5), targets.split(5), strict=True):
            largest = part.amax(1, keepdim=True)
            log_sums = (part - largest).exp().sum(1, keepdim=True).log() + largest
            expected = expected + (log_sums - part.gather(1, own[:, None])).sum()
        assert torch.equal(cross_entropy_sum(logits, targets).detach(), expected)


def test_rows_without_a_target_alone_give_a_loss_of_zero_and_no_gradient() -> None:
    logits, targets = rows()
    loss = cross_entropy_sum(logits, torch.full_like(targets, -100))
    assert float(loss.detach()) == 0
    assert not torch.autograd.grad(loss, logits)[0].any()


def test_a_target_that_is_no_token_is_an_error() -> None:
    logits, targets = rows()
    if targets.is_cuda:
        pytest.skip("a GPU's own assertion would end every later test of this process")
    targets[20] = TOKENS
    with pytest.raises(RuntimeError, match="out of bounds"):
        cross_entropy_sum(logits, targets)


def test_a_loss_that_is_not_finite_is_seen() -> None:
    logits, targets = rows()
    with torch.no_grad():
        logits[4, 9] = torch.nan
    loss = cross_entropy_sum(logits, targets)
    assert loss.isnan()
    assert torch.autograd.grad(loss, logits)[0][4].isnan().all()


def test_backward_may_run_twice_as_zero_bubble_schedules_do() -> None:
    logits, targets = rows()
    loss = cross_entropy_sum(logits, targets)
    once = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    again = torch.autograd.grad(loss, logits, torch.tensor(2.0))[0]
    torch.testing.assert_close(again, 2 * once)


def test_small_logits_and_those_without_gradients_are_torchs_to_the_bit() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(5, TOKENS, requires_grad=True), torch.tensor([1, 2, -100, 3, 4])
    assert torch.equal(cross_entropy_sum(logits, targets), plain(logits, targets))
    logits, targets = rows()
    assert torch.equal(cross_entropy_sum(logits.detach(), targets), plain(logits.detach(), targets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_step_holds_fewer_tensors_of_the_logits_size_than_torchs(dtype: torch.dtype) -> None:
    """In 16 bits never one in fp32: logits and their gradient, and some rows of either."""
    targets = rows()[1]
    hidden, weight = torch.randn(ROWS, 8, dtype=dtype), torch.randn(TOKENS, 8, dtype=dtype, requires_grad=True)

    def peak(loss: Callable[[Tensor, Tensor], Tensor]) -> float:
        with TensorPeak(chosen_device()) as memory:
            torch.autograd.grad(loss(F.linear(hidden, weight), targets), weight)
        return memory.peak_bytes / (ROWS * TOKENS * dtype.itemsize)

    own, torchs = {torch.float32: (2.6, 3.1), torch.bfloat16: (3.3, 6.1)}[dtype]
    assert peak(cross_entropy_sum) < own < torchs < peak(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_losses_of_each_row_are_torchs_some_rows_at_a_time(dtype: torch.dtype) -> None:
    logits, targets = rows(dtype)
    expected = F.cross_entropy(logits.detach().float(), targets, ignore_index=-100, reduction="none")
    with TensorPeak(chosen_device()) as memory:
        found = cross_entropy_of_each(logits.detach(), targets)
    assert torch.equal(found, expected)
    beside = memory.peak_bytes - logits.nbytes
    assert beside < 0.5 * ROWS * TOKENS * 4  # torch's holds one or two tensors of this size
