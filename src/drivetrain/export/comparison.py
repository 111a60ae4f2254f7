"""Compares an export's scores and answers with the run's own, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drivetrain.workloads.exporting import IGNORED


@dataclass(frozen=True)
class Difference:
    """maximum, mean: of the absolute differences of scores. relative: their root mean square over that of the run's
    scores around their mean in each row, so that it does not depend on the scale. kl_mean, kl_max: Kullback-Leibler
    divergence of the export's distribution from the run's, in nats, over rows. agreement: share of rows whose largest
    score is at the same place. None for scores that are no logits of classes or tokens."""

    maximum: float
    mean: float
    relative: float
    kl_mean: float | None
    kl_max: float | None
    agreement: float | None
    rows: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Answers:
    """equal: answers with the run's tokens. tied: those that part from them where the run's two likeliest logits were
    so close that rounding decides. other: the rest."""

    equal: int = 0
    tied: int = 0
    other: int = 0


def difference(reference: Sequence[Tensor], found: Sequence[Tensor], classes: bool) -> Difference:
    """Compares scores batch by batch, rows on the first dimension. classes: whether rows are logits of alternatives.
    Scores that are not finite, or of another shape, are infinitely far apart."""
    shapes = [tuple(each.shape) for each in reference], [tuple(each.shape) for each in found]
    if shapes[0] != shapes[1] or not all(bool(each.isfinite().all()) for each in found):
        far = float("inf")
        return Difference(
            far, far, far, far if classes else None, far if classes else None, 0.0 if classes else None, 0
        )
    ours, theirs = (_rows(each) for each in (reference, found))
    gap = ours - theirs
    spread = (ours - ours.mean(-1, keepdim=True)) if ours.shape[-1] > 1 else ours
    relative = gap.square().mean().sqrt() / spread.square().mean().sqrt().clamp(min=1e-12)
    kl_mean = kl_max = agreement = None
    if classes:
        logs = ours.log_softmax(-1), theirs.log_softmax(-1)
        divergences = F.kl_div(logs[1], logs[0], reduction="none", log_target=True).sum(-1).clamp(min=0)
        kl_mean, kl_max = divergences.mean().item(), divergences.max().item()
        agreement = (ours.argmax(-1) == theirs.argmax(-1)).double().mean().item()
    return Difference(
        gap.abs().max().item(), gap.abs().mean().item(), relative.item(), kl_mean, kl_max, agreement, len(ours)
    )


def _rows(batches: Sequence[Tensor]) -> Tensor:
    """Returns all rows in fp64, (rows, scores)."""
    rows = [each.double().reshape(len(each), -1) if each.dim() > 1 else each.double()[:, None] for each in batches]
    if len({each.shape[1] for each in rows}) > 1:  # of a user's own model, whose samples differ in size
        return torch.cat([each.flatten() for each in rows])[:, None]
    return torch.cat(rows)


def metrics(scores: Sequence[Tensor], labels: Sequence[Tensor | None], sequences: bool) -> dict[str, float]:
    """Returns the loss per target and, of classes, the accuracy, over the compared samples; empty without labels."""
    pairs = [(each.double(), own) for each, own in zip(scores, labels, strict=True) if own is not None]
    if not pairs:
        return {}
    logits, targets = torch.cat([each for each, _ in pairs]), torch.cat([own for _, own in pairs])
    counts = targets >= 0
    if not bool(counts.any()):
        return {}
    loss = F.cross_entropy(logits[counts], targets[counts], ignore_index=IGNORED).item()
    right = (logits[counts].argmax(-1) == targets[counts]).double().mean().item()
    return {"loss": loss, "token_accuracy" if sequences else "accuracy": right}


def answers(
    ours: Sequence[Sequence[int]], margins: Sequence[Sequence[float]], theirs: Sequence[Sequence[int]], tie: float
) -> Answers:
    """Compares greedy answers. margins: of each of our tokens. tie: a margin below which two tokens are as likely."""
    equal = tied = other = 0
    for own, gaps, found in zip(ours, margins, theirs, strict=True):
        place = next((n for n, (a, b) in enumerate(zip(own, found, strict=False)) if a != b), None)
        if place is None and len(own) == len(found):
            equal += 1
        elif place is not None and gaps[place] < tie:
            tied += 1
        else:
            other += 1
    return Answers(equal, tied, other)
