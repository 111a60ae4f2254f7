"""Converts a loss that returns a mean into the sum and the number of terms that the engine needs.

`mean * count` is exact for any loss whose mean is over `count` equal terms. PyTorch's own losses average over every
element of the target, those over classes over every label that is not ignored, `batchmean` over samples. A loss of the
user's is assumed to average over samples (`loss_cuts` checks it).
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import loss as losses

from drivetrain.errors import UserError, problem
from drivetrain.memory.transfers import on_host
from drivetrain.workloads.user_file import FIELD

OVER_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
BUILT_IN = tuple(cls for name, cls in vars(losses).items() if name.endswith("Loss") and not name.startswith("_"))
IGNORED = -100  # PyTorch's, of targets that do not count
MODULES: dict[Any, type[nn.Module]] = {  # what a function of torch.nn.functional is as a module
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
}


class SummedLoss:
    """Makes loss(output, target) → a mean return its sum. Raises UserError if it returns no mean, or a weighted one."""

    def __init__(self, loss: Any) -> None:
        loss = MODULES[loss]() if inspect.isfunction(loss) and loss in MODULES else loss
        reduction = getattr(loss, "reduction", "mean")
        if reduction not in ("mean", "batchmean"):
            raise problem(FIELD, f"the loss has reduction={reduction!r}", "use reduction='mean', PyTorch's default")
        if isinstance(loss, OVER_CLASSES) and loss.weight is not None:
            raise problem(
                FIELD,
                "class weights make the loss a weighted mean, which depends on how a batch is cut",
                "define loss_sum(model, batch) with reduction='sum' and count(batch) in place of loss "
                "(docs/how-to/own-code.md shows it); divide the weights by their mean over the training targets to "
                "keep the loss's scale",
            )
        self._loss = loss
        self._over_samples = reduction == "batchmean" or not isinstance(loss, BUILT_IN)
        self.ignored: int | None = loss.ignore_index if isinstance(loss, OVER_CLASSES) else None

    @property
    def is_binary(self) -> bool:
        return isinstance(self._loss, nn.BCEWithLogitsLoss | nn.BCELoss)

    @property
    def takes_logits(self) -> bool:
        return isinstance(self._loss, nn.BCEWithLogitsLoss)

    def needs_whole_numbers(self, output: Tensor, target: Tensor) -> bool:
        """Returns whether targets are numbers of classes with a fraction's dtype, which torch refuses as well."""
        if not isinstance(self._loss, OVER_CLASSES) or not target.is_floating_point():
            return False
        return isinstance(self._loss, nn.NLLLoss) or target.dim() != output.dim()

    def no_classes(self, who: str, target: Tensor) -> UserError:
        """who: "train_data gives", for instance."""
        soft = "" if isinstance(self._loss, nn.NLLLoss) else ", or a probability of each class for each sample"
        name, shape = type(self._loss).__name__, tuple(target.shape)
        why = f"{who} targets of {target.dtype}, shape {shape}; {name} takes the classes' numbers as torch.int64{soft}"
        return problem(FIELD, why, "give target.long() in the data, or the loss of numbers (nn.MSELoss())")

    def count(self, target: Tensor) -> int:
        if self._over_samples:
            if not target.is_floating_point() and bool((on_host(target) == IGNORED).any()):
                raise problem(
                    FIELD,
                    f"targets of {IGNORED} do not count in some losses, and it is unknown whether they do in this one",
                    "give nn.CrossEntropyLoss(), or define loss_sum(model, batch) and count(batch)",
                )
            return len(target)
        if self.ignored is None:
            return target.numel()
        if target.is_floating_point():  # class probabilities: (B, classes, ...)
            if target.dim() < 2:
                raise self.no_classes("the data give", target)
            return target.numel() // target.shape[1]
        return int((on_host(target) != self.ignored).sum())

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns a scalar, in fp32."""
        if self.needs_whole_numbers(output, target):
            raise self.no_classes("the data give", target)
        count = self.count(target)
        if not count:  # the mean of no terms is NaN; their sum is 0
            return output.float().sum() * 0.0
        if isinstance(self._loss, nn.Module):
            self._loss.to(output.device)  # its weights, if it has any
        both_float = output.is_floating_point() and target.is_floating_point()
        mean: Tensor = self._loss(output.float(), target.float() if both_float else target)
        return mean * count
