"""Losses of supervised fine-tuning that weigh each token, as data: what each reads, and which settings go together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Self

from drivetrain.config.adapter import Adapter
from drivetrain.config.base import doc
from drivetrain.config.reference import ReferenceBlock, reference_problems
from drivetrain.errors import Problem

FIELD = "workload.sft"
SFT = "sft"
PLAIN, DFT, EAFT, ASFT = "cross_entropy", "dft", "eaft", "asft"
USUAL_ALPHA = {EAFT: 1.0, ASFT: 0.1}
OF_DISTRIBUTIONS = (EAFT, ASFT)  # read more of each distribution than the target's probability


class FineTuning(ReferenceBlock):
    loss: Literal["cross_entropy", "dft", "eaft", "asft"] = doc(
        "Loss of a token: cross_entropy; weighted by its own probability (dft) or by the entropy there (eaft); asft: "
        "dft, and the divergence from a reference",
        "cross_entropy",
    )
    alpha: float | None = doc(
        "eaft: power of the entropy; left out, 1. asft: weight of the divergence; 0.1", None, gt=0
    )

    @property
    def alpha_or_usual(self) -> float:
        return USUAL_ALPHA.get(self.loss, 0.0) if self.alpha is None else self.alpha

    def settled(self, adapters: Sequence[Adapter] | None) -> Self:
        """Returns the block with its reference chosen."""
        return self.with_reference(self.loss == ASFT, adapters)


def fine_tuning_problems(block: FineTuning, stage: str, adapters: Sequence[Adapter] | None) -> Iterator[Problem]:
    """Yields settings that do not go together, or that nothing reads."""
    if stage != SFT:
        for name in block.given:
            why = f"only stage {SFT} reads it, and workload.stage is {stage}"
            yield Problem(f"{FIELD}.{name}", why, f"leave it out, or give stage: {SFT}")
        return
    if block.alpha is not None and block.loss not in USUAL_ALPHA:
        yield Problem(f"{FIELD}.alpha", f"the loss {block.loss} has none", "leave it out, or give loss: eaft or asft")
    if block.loss == ASFT and block.reference == "none":
        why = "asft measures the divergence from a reference"
        yield Problem(f"{FIELD}.reference", why, "leave it out, or give loss: dft")
    if block.reference == "cached":
        why = "asft reads whole distributions, too many numbers to keep"
        yield Problem(f"{FIELD}.reference", why, "give reference: copy")
    if block.loss != ASFT and block.reference in ("copy", "adapters_off"):
        yield Problem(f"{FIELD}.reference", f"the loss {block.loss} has none", "leave it out, or give loss: asft")
    yield from reference_problems(block, FIELD, adapters)
