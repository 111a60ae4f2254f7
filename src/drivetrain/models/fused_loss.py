"""Computes the cross-entropy of a linear head without its logits: for N targets over V tokens they would be N x V
numbers.

Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models": the vocabulary is taken in slabs. From each
slab's logits the forward pass keeps only a running log-sum-exp and the targets' own logits; the backward pass computes
the slab again, and from it the slab's part of the weight's gradient, written once where it belongs, and its share of
the hidden states' gradient. At any time there is one slab and one gradient of each.

The other known way (Hsu et al. 2024, "Liger Kernel") takes the rows in chunks and computes gradients in the forward
pass already. That is three matrix products where this is four, but it holds a gradient of the weight from the forward
to the backward pass, a second one while it is scaled, one for each micro-batch in flight under a pipeline, and adds one
chunk's to the other's in fp32. Relative to the time of plain logits (fp32, one CPU core, 1,024 rows of 512 over 128,256
tokens; 4,096 of 128 over 32,000) slabs took 1.07 and 0.75, row chunks of 64 MiB 1.01 and 0.77.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from drivetrain.models.cross_entropy import IGNORED
from drivetrain.models.logit_kernels import kernels_for
from drivetrain.models.planned_device import alike_parts, kind_of_device

SLAB_BYTES = 8 * 2**20  # of a slab's logits in fp32: with 64 MiB, which no cache holds, a CPU took a tenth longer
LARGER_ON_GPU = 64  # half of that in 16 bits: an H200 took up to a fifth longer with 64 MiB, and no less with more
LEAST_COLUMNS = 512  # narrower ones waste any processor; with very many rows a slab then takes more
AUTO_FROM = 4096  # tokens of a vocabulary below which fused_loss=auto never takes the loss from the logits
MANY_BYTES = 128 * 2**20  # of logits in fp32, beyond which it does on a CPU
MANY_ON_GPU = 4  # times as many; 8,192 x 32,000 logits took 0.77 of the time of all at once on an H200


def are_many(hidden: Tensor, weight: Tensor) -> bool:
    """Returns whether fused_loss=auto uses slabs instead of all logits of hidden states (N, H) over a weight (V, H).

    The size alone decides. One product more takes 1.2 to 1.35 of the time of head and loss (fp32, one CPU core) where
    rows are wide (H = 384, 896) and logits nearly fit into a cache (256 x 32,000, 4,096 x 8,000: 33 to 131 MB). Where
    they are more, their memory costs as much: 0.79 and 1.18 at 4,096 x 32,000 (H = 128, 384), 1.07 at 1,024 x 128,256.
    """
    most = MANY_BYTES * (1 if kind_of_device(hidden) == "cpu" else MANY_ON_GPU)
    return 4 * len(hidden) * len(weight) > most


@torch.compiler.disable
def linear_cross_entropy_sum(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Returns cross_entropy(linear(hidden, weight, bias).float(), targets, reduction="sum"), under autocast too: fp32,
    scalar.

    hidden: (N, H); weight: (V, H); bias: (V,); targets: (N,) int64, -100 is ignored. NaN if a target is no token.
    """
    if _columns(hidden) >= len(weight):  # one slab is all there is
        return F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, ignore_index=IGNORED, reduction="sum")
    losses: Tensor = _SlabLosses.apply(hidden, weight, bias, targets, _compute_dtype(hidden))
    return losses.sum()


@torch.compiler.disable
def linear_cross_entropies(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Returns the same for each row, (N,) fp32: 0 where the target is -100."""
    if _columns(hidden) >= len(weight):
        return F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, ignore_index=IGNORED, reduction="none")
    losses: Tensor = _SlabLosses.apply(hidden, weight, bias, targets, _compute_dtype(hidden))
    return losses


@torch.compiler.disable
@torch.no_grad()
def linear_argmax_and_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns for evaluation the likeliest token (N,) int64 and the loss (N,) fp32 of each row, 0 where the target is
    -100."""
    found = _Scan(hidden.to(_compute_dtype(hidden)), targets)
    for start, part, offset in _slabs(found.hidden, weight, bias):
        found.see(start, _logits(found.hidden, part, offset), wants_argmax=True)
    return found.argmax, found.losses


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """Returns the dtype in which a linear layer would compute here."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _columns(hidden: Tensor) -> int:
    most = SLAB_BYTES * (1 if kind_of_device(hidden) == "cpu" else LARGER_ON_GPU)
    return max(LEAST_COLUMNS, most // (4 * max(1, len(hidden))))


def _slabs(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Yields parts of the vocabulary: first token, weight (v, H) and bias (v,) in the dtype of the hidden states."""
    width = _columns(hidden)
    for start in alike_parts(range(0, len(weight), width)):
        own = slice(start, start + width)
        yield start, weight[own].to(hidden.dtype), None if bias is None else bias[own].to(hidden.dtype)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns a slab's logits, (N, v), in fp32; for kernels as the product gives them."""
    logits = F.linear(hidden, weight, bias)
    return logits if kernels_for(logits) is not None else logits.float()


class _Scan:
    """The running values of the logits that the forward pass has seen."""

    def __init__(self, hidden: Tensor, targets: Tensor) -> None:
        self.hidden, self.targets = hidden, targets
        self.log_sum = torch.full((len(hidden),), -torch.inf, dtype=torch.float32, device=hidden.device)
        self.best = self.log_sum.clone()
        self.argmax = torch.zeros_like(targets)
        self._at_target = torch.full_like(self.log_sum, torch.nan)  # NaN stays where a target is no token

    def see(self, start: int, logits: Tensor, wants_argmax: bool = False) -> None:
        """Adds logits (N, v) of the tokens from `start`, which may be overwritten."""
        if (kernels := kernels_for(logits)) is not None:
            likeliest = (self.best, self.argmax) if wants_argmax else None
            kernels.see(logits, start, self.targets, self.log_sum, self._at_target, likeliest)
            return
        place, inside = _places(self.targets, start, logits.shape[1])
        self._at_target = torch.where(inside, logits.gather(1, place)[:, 0].float(), self._at_target)
        if wants_argmax:
            highest, where = logits.max(1)
            largest = highest.float()
            self.argmax = torch.where(largest > self.best, where + start, self.argmax)
            self.best = torch.maximum(self.best, largest)
        else:
            largest = logits.amax(1).float()
        largest = largest.clamp(min=torch.finfo(largest.dtype).min)  # a slab of -inf alone: -inf less -inf is no number
        own = logits.sub_(largest[:, None]).exp_().sum(1).log_().add_(largest)
        self.log_sum = torch.logaddexp(self.log_sum, own)

    @property
    def losses(self) -> Tensor:
        return torch.where(self.targets == IGNORED, 0, self.log_sum - self._at_target)


def _places(targets: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns the position of each row's target in a slab (N, 1), and whether it is there at all (N,)."""
    place = targets - start
    return place.clamp(0, width - 1)[:, None], (place >= 0) & (place < width)


def _changes(logits: Tensor, start: int, targets: Tensor, log_sum: Tensor, factor: Tensor) -> Tensor:
    """Returns the gradient of a slab's logits (N, v), which are overwritten: (softmax - 1 at the target) * factor."""
    if (kernels := kernels_for(logits)) is not None:
        kernels.changes(logits, start, targets, log_sum, factor, into=logits)
        return logits
    change = logits.sub_(log_sum[:, None]).exp_()
    place, inside = _places(targets, start, logits.shape[1])
    return change.scatter_add_(1, place, -inside.float()[:, None]).mul_(factor[:, None])


class _SlabLosses(torch.autograd.Function):
    """The autograd function. Its backward pass computes in the dtype of the forward pass, inside or outside of an
    autocast block, like torch.amp.custom_fwd and custom_bwd, which need the device in advance."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, compute: torch.dtype
    ) -> Tensor:
        found = _Scan(hidden.to(compute), targets)
        for start, part, offset in _slabs(found.hidden, weight, bias):
            found.see(start, _logits(found.hidden, part, offset))
        ctx.save_for_backward(found.hidden, weight, bias, targets, found.log_sum)
        ctx.dtype = hidden.dtype
        return found.losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        hidden, weight, bias, targets, log_sum = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        for_hidden = torch.zeros_like(hidden, dtype=torch.float32) if wants_hidden else None
        for_weight = torch.empty_like(weight) if wants_weight else None
        for_bias = torch.empty_like(bias) if wants_bias else None
        factor = torch.where(targets == IGNORED, 0, upstream.float())
        with torch.autocast(hidden.device.type, enabled=False):
            for start, part, offset in _slabs(hidden, weight, bias):
                change = _changes(_logits(hidden, part, offset), start, targets, log_sum, factor)
                rounded = change.to(hidden.dtype)
                own = slice(start, start + len(part))
                if for_hidden is not None:
                    for_hidden += rounded @ part
                if for_weight is not None:
                    for_weight[own] = rounded.T @ hidden
                if for_bias is not None:
                    for_bias[own] = change.sum(0, dtype=torch.float32)
        return None if for_hidden is None else for_hidden.to(ctx.dtype), for_weight, for_bias, None, None
