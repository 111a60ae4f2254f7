from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.errors import UserError
from drivetrain.workloads.user_loss import SummedLoss

torch.manual_seed(0)
NUMBERS = (torch.randn(6, 3), torch.randn(6, 3))
CLASSES = (torch.randn(6, 4), torch.tensor([0, 1, -100, 3, -100, 2]))
PIXELS = (torch.randn(6, 4, 2), torch.randint(0, 4, (6, 2)))
SOFT = (torch.randn(6, 4), torch.rand(6, 4).softmax(1))
YES = (torch.randn(6, 3), torch.rand(6, 3).round())

LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[Tensor, Tensor], float]] = {
    "mse": (nn.MSELoss(), NUMBERS, float(F.mse_loss(*NUMBERS, reduction="sum"))),
    "huber": (nn.HuberLoss(), NUMBERS, float(F.huber_loss(*NUMBERS, reduction="sum"))),
    "cross-entropy, some ignored": (nn.CrossEntropyLoss(), CLASSES, float(F.cross_entropy(*CLASSES, reduction="sum"))),
    "cross-entropy of pixels": (nn.CrossEntropyLoss(), PIXELS, float(F.cross_entropy(*PIXELS, reduction="sum"))),
    "cross-entropy of probabilities": (nn.CrossEntropyLoss(), SOFT, float(F.cross_entropy(*SOFT, reduction="sum"))),
    "label smoothing": (
        nn.CrossEntropyLoss(label_smoothing=0.1),
        CLASSES,
        float(F.cross_entropy(*CLASSES, reduction="sum", label_smoothing=0.1)),
    ),
    "binary, yes weighs more": (
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)),
        YES,
        float(F.binary_cross_entropy_with_logits(*YES, reduction="sum", pos_weight=torch.tensor(3.0))),
    ),
    "batchmean": (nn.KLDivLoss(reduction="batchmean"), SOFT, float(F.kl_div(*SOFT, reduction="sum"))),
    "a function": (lambda o, t: (o - t).abs().mean(), NUMBERS, float((NUMBERS[0] - NUMBERS[1]).abs().mean()) * 6),
}


@pytest.mark.parametrize(("loss", "batch", "summed"), LOSSES.values(), ids=LOSSES)
def test_the_sum_is_torchs_own(loss: Callable[..., Tensor], batch: tuple[Tensor, Tensor], summed: float) -> None:
    assert float(SummedLoss(loss)(*batch)) == pytest.approx(summed, rel=1e-5)


@pytest.mark.parametrize(("loss", "batch", "_"), LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("cut", [1, 4])
def test_sum_and_count_of_the_pieces_give_the_mean_of_the_whole(
    loss: Callable[..., Tensor], batch: tuple[Tensor, Tensor], _: float, cut: int
) -> None:
    summed = SummedLoss(loss)
    pieces = [tuple(part[where] for part in batch) for where in (slice(cut), slice(cut, None))]
    total = sum(float(summed(*piece)) for piece in pieces)
    assert total / sum(summed.count(target) for _, target in pieces) == pytest.approx(float(loss(*batch)), rel=1e-5)


def test_a_piece_of_ignored_targets_adds_nothing() -> None:
    output = torch.randn(2, 4, requires_grad=True)
    summed = SummedLoss(nn.CrossEntropyLoss())(output, torch.tensor([-100, -100]))
    summed.backward()
    assert summed.item() == 0
    assert output.grad is not None
    assert not output.grad.any()


@pytest.mark.parametrize(("loss", "output", "target"), [
    (nn.CrossEntropyLoss(), torch.randn(6, 4), torch.zeros(6)),
    (nn.CrossEntropyLoss(), PIXELS[0], torch.zeros(6, 2)),
    (nn.NLLLoss(), torch.randn(6, 4), torch.zeros(6, 4)),
])  # fmt: skip
def test_targets_that_torch_refuses_for_their_dtype_are_refused_by_name(
    loss: nn.Module, output: Tensor, target: Tensor
) -> None:
    with pytest.raises(RuntimeError):
        loss(output, target)
    with pytest.raises(UserError, match=r"targets of torch\.float32, shape .* as torch\.int64"):
        SummedLoss(loss)(output, target)
    if target.dim() == 1:
        with pytest.raises(UserError, match=r"targets of torch\.float32"):
            SummedLoss(loss).count(target)
