from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.measure.memory import TensorPeak
from drivetrain.models import fused_loss
from drivetrain.models.fused_loss import linear_argmax_and_losses, linear_cross_entropy_sum
from drivetrain.numerics.emulation import fp32_products
from tests.device import chosen_device

ROWS, WIDTH, VOCABULARY = 23, 16, 1500

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(autouse=True)
def _several_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_loss, "LARGER_ON_GPU", 1)
    monkeypatch.setattr(fused_loss, "SLAB_BYTES", 1)  # slabs of 512 tokens, the last one narrower


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits.float(), targets, ignore_index=-100, reduction="sum")


def head(bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, WIDTH), torch.randn(VOCABULARY, WIDTH) / 2
    targets = torch.randint(VOCABULARY, (ROWS,))
    targets[[0, 7]] = -100
    targets[[1, 2, 3]] = torch.tensor([511, 512, VOCABULARY - 1])  # at the edges of slabs
    parts = [hidden, weight, torch.randn(VOCABULARY)] if bias else [hidden, weight]
    leaves = [part.to(dtype).requires_grad_() for part in parts]
    return leaves[0], leaves[1], leaves[2] if bias else None, targets


def value_and_gradients(loss: Tensor, *leaves: Tensor | None) -> list[Tensor]:
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    # as an engine does, the loss is scaled and divided
    return [loss.detach(), *torch.autograd.grad(loss * 3 / 7, wanted)]


def assert_close(ours: list[Tensor], theirs: list[Tensor], relative: float) -> None:
    assert len(ours) == len(theirs)
    for own, other in zip(ours, theirs, strict=True):
        assert own.dtype == other.dtype
        assert float((own - other).norm() / other.norm()) <= relative


@pytest.mark.parametrize("bias", [True, False])
def test_value_and_gradients_are_cross_entropys(bias: bool) -> None:
    given = head(bias)
    expected = value_and_gradients(plain(*given), *given[:3])
    assert_close(value_and_gradients(linear_cross_entropy_sum(*given), *given[:3]), expected, 1e-6)


def test_one_slab_is_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_loss, "SLAB_BYTES", 2**20)
    given = head()
    expected = value_and_gradients(plain(*given), *given[:3])
    ours = value_and_gradients(linear_cross_entropy_sum(*given), *given[:3])
    assert all(torch.equal(own, other) for own, other in zip(ours, expected, strict=True))


def test_backward_may_run_twice_as_zero_bubble_schedules_do() -> None:
    hidden, weight, bias, targets = head()
    loss = linear_cross_entropy_sum(hidden, weight, bias, targets)
    once = torch.autograd.grad(loss, [hidden], retain_graph=True)
    again = torch.autograd.grad(loss, [hidden, weight], torch.tensor(2.0))
    expected = torch.autograd.grad(plain(hidden, weight, bias, targets), [hidden, weight], torch.tensor(2.0))
    assert_close([2 * once[0], *again], [expected[0], *expected], 1e-6)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    given = head()
    dict(zip(("hidden", "weight", "bias"), given, strict=False))[frozen].requires_grad_(False)
    expected = value_and_gradients(plain(*given), *given[:3])
    assert len(expected) == 3
    assert_close(value_and_gradients(linear_cross_entropy_sum(*given), *given[:3]), expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cast", [True, False], ids=["autocast", "16-bit parameters"])
def test_in_16_bits_it_is_as_near_to_the_truth_as_the_plain_way(dtype: torch.dtype, cast: bool) -> None:
    given = head(dtype=torch.float32 if cast else dtype)
    exact = [part.detach().double().requires_grad_() for part in given[:3] if part is not None]
    truth = value_and_gradients(plain(*exact, given[3]), *exact)  # type: ignore[arg-type]
    with fp32_products(True):
        with torch.autocast(chosen_device(), dtype=dtype, enabled=cast):
            ways = [way(*given) for way in (linear_cross_entropy_sum, plain)]
        ours, theirs = (value_and_gradients(loss, *given[:3]) for loss in ways)
    for own, other, true in zip(ours, theirs, truth, strict=True):
        assert own.dtype == other.dtype
        # a slab's share of the hidden states' gradient is rounded before it is added to the others'
        assert (own - true).norm() <= 1.4 * (other - true).norm() + 1e-6 * true.norm()
    assert not torch.equal(ours[1], truth[1])  # 16 bits were used


@pytest.mark.parametrize("within", [True, False])
def test_backward_computes_as_forward_did_whatever_the_block_around_it(within: bool) -> None:
    given = head()
    seen = set()

    class Dtypes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                seen.add(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with fp32_products(True), Dtypes():
        with torch.autocast(chosen_device(), dtype=torch.bfloat16, enabled=not within):
            loss = linear_cross_entropy_sum(*given)
        with torch.autocast(chosen_device(), dtype=torch.bfloat16, enabled=within):
            loss.backward()
    assert seen == {torch.float32 if within else torch.bfloat16}


def test_without_any_target_the_loss_is_0_and_so_are_the_gradients() -> None:
    hidden, weight, bias, targets = head()
    loss = linear_cross_entropy_sum(hidden, weight, bias, torch.full_like(targets, -100))
    assert loss.item() == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, [hidden, weight, bias]))


def test_a_target_that_is_no_token_gives_nan() -> None:
    hidden, weight, bias, targets = head()
    if targets.is_cuda:
        pytest.skip("a GPU's own assertion would end every later test of this process")
    targets[4] = VOCABULARY
    assert linear_cross_entropy_sum(hidden, weight, bias, targets).isnan()


def test_without_gradients_nothing_is_kept_for_them() -> None:
    given = head()
    with torch.no_grad():
        loss = linear_cross_entropy_sum(*given)
    assert loss.grad_fn is None
    assert torch.allclose(loss, plain(*given))


@pytest.mark.parametrize("cast", [False, True])
def test_for_evaluation_losses_and_likeliest_tokens_are_those_of_the_logits(cast: bool) -> None:
    hidden, weight, bias, targets = head()
    with fp32_products(True), torch.autocast(chosen_device(), dtype=torch.bfloat16, enabled=cast):
        argmax, losses = linear_argmax_and_losses(hidden, weight, bias, targets)
        logits = F.linear(hidden, weight, bias).float()
    # a GPU may round logits of a slab to the other neighbour in 16 bits
    near = 2**-7 * float(logits.detach().abs().max()) if cast and losses.is_cuda else 1e-5
    likeliest = logits.gather(1, argmax[:, None])[:, 0]
    assert torch.equal(argmax, logits.argmax(1)) or float((logits.amax(1) - likeliest).max()) <= near
    torch.testing.assert_close(losses, F.cross_entropy(logits, targets, reduction="none"), atol=near, rtol=1e-6)
    assert not losses.requires_grad


def test_a_tied_embedding_gets_both_gradients() -> None:
    _, weight, _, targets = head(bias=False)
    tokens = torch.arange(ROWS)
    expected = torch.autograd.grad(plain(F.embedding(tokens, weight), weight, None, targets), [weight])[0]
    ours = torch.autograd.grad(linear_cross_entropy_sum(F.embedding(tokens, weight), weight, None, targets), [weight])
    assert_close(list(ours), [expected], 1e-6)


def test_a_large_vocabulary_takes_less_than_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows = 320 if chosen_device() == "cpu" else 5120  # of more than one slab
    hidden = torch.randn(rows, 8, requires_grad=True)
    weight = torch.randn(128_256, 8, requires_grad=True)
    targets = torch.randint(128_256, (rows,))
    peaks = []
    for way in (linear_cross_entropy_sum, plain):
        with TensorPeak(chosen_device()) as memory:
            memory.track([hidden, weight])
            way(hidden, weight, None, targets).backward()
        peaks.append(memory.peak_bytes)
        hidden.grad = weight.grad = None
    assert peaks[0] <= peaks[1] / 2
    slab = fused_loss.SLAB_BYTES * (1 if chosen_device() == "cpu" else fused_loss.LARGER_ON_GPU)
    assert peaks[0] <= 3 * slab + 2 * weight.nbytes


def test_a_whole_piece_of_the_vocabulary_may_be_excluded() -> None:
    """By a bias of -inf, as for tokens that only pad the vocabulary."""
    generator = torch.Generator(chosen_device()).manual_seed(0)
    hidden, weight = (torch.randn(size, 8, generator=generator, requires_grad=True) for size in (6, 20_000))
    bias = torch.zeros(20_000)
    bias[9_000:] = -torch.inf
    targets = torch.arange(6)
    fused = linear_cross_entropy_sum(hidden, weight, bias, targets)
    plain = F.cross_entropy(hidden @ weight.T + bias, targets, reduction="sum")
    torch.testing.assert_close(fused, plain)
    for ours, theirs in zip(*(torch.autograd.grad(loss, [hidden, weight]) for loss in (fused, plain)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
