"""The reference that a model is held to while it learns from preferences or rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator

from drivetrain.config.adapter import PROMPTS, Adapter
from drivetrain.config.base import Frozen, PathOrId, decides_memory, doc
from drivetrain.errors import Problem


def as_block(given: Any) -> Any:
    return {"path": given} if isinstance(given, str) else given


class OtherModelBlock(Frozen):
    path: PathOrId | None = doc(
        "Transformers causal language model with the same tokens: a local folder or a hub id",
        None,
        json_schema_extra=decides_memory,
    )
    precision: Literal["fp32", "bf16", "fp16"] | None = doc(
        "What it is kept in and computes in; left out, the run's precision decides",
        None,
        json_schema_extra=decides_memory,
    )


class ReferenceBlock(Frozen):
    """The settings of a reference, which the blocks of several stages have."""

    reference: Literal["auto", "copy", "cached", "adapters_off", "none"] = doc(
        "A frozen copy of the model as it starts; its log-probabilities, computed before training and kept on disk "
        "(cached); the model with its adapters off; or none (dpo, kto: a uniform one); auto takes adapters off where "
        "they start without effect, else the copy; none where the loss needs none",
        "auto",
    )
    reference_model: Annotated[OtherModelBlock, BeforeValidator(as_block)] = doc(
        "Another model in place of the model as it starts: a path, or a block", OtherModelBlock()
    )
    reference_every: int | None = doc("Let the copy follow the model after so many steps (TR-DPO)", None, gt=0)
    reference_mixing: float = doc("reference_every: share of the model in the copy that follows it", 0.6, gt=0, le=1)

    @property
    def given(self) -> list[str]:
        """Returns the settings that differ from their defaults."""
        fields = type(self).model_fields
        return [name for name in fields if getattr(self, name) != fields[name].default]

    def with_reference(self, needed: bool, adapters: Sequence[Adapter] | None) -> Self:
        """Returns the block with its reference chosen."""
        if self.reference != "auto":
            return self
        off = bool(adapters) and self.reference_model.path is None and _starts_without_effect(adapters or ())
        return self.model_copy(update={"reference": "none" if not needed else "adapters_off" if off else "copy"})


def reference_problems(block: ReferenceBlock, field: str, adapters: Sequence[Adapter] | None) -> Iterator[Problem]:
    """Yields a reference that cannot be made, or settings of it that nothing reads. field: of the block."""
    if block.reference == "adapters_off":
        if not adapters:
            yield Problem(f"{field}.reference", "there are no adapters to put off", "give adapter, or reference: copy")
        elif any(adapter.method in PROMPTS or adapter.train_also or adapter.pissa for adapter in adapters):
            why = "virtual tokens, modules trained whole and PiSSA's changed weights cannot be put off"
            yield Problem(f"{field}.reference", why, "give reference: copy")
    if block.reference_model.path is not None and block.reference not in ("copy", "cached"):
        why = f"the reference is {block.reference}: it needs no other model"
        yield Problem(f"{field}.reference_model", why, "leave it out, or give reference: copy or cached")
    has_other = block.reference_model.path is not None
    if block.reference_model.precision is not None and (not has_other or block.reference != "copy"):
        cached = "the reference is cached: it is computed in the run's precision, and gone when training starts"
        why = cached if block.reference == "cached" else "no other model lies beside the trained one"
        yield Problem(f"{field}.reference_model.precision", why, "leave it out")
    if block.reference_model.path is not None and block.reference_every is not None:
        why = "another model cannot follow the trained one"
        yield Problem(f"{field}.reference_every", why, "leave it or reference_model out")
    for name in ("reference_every", "reference_mixing"):
        if name in block.given and (block.reference != "copy" or block.reference_every is None):
            why = "no copy follows the model" if block.reference == "copy" else f"the reference is {block.reference}"
            yield Problem(f"{field}.{name}", why, "give reference: copy and reference_every, or leave it out")


def _starts_without_effect(adapters: Sequence[Adapter]) -> bool:
    """Returns whether the model as it starts is the base: LoRA's B is 0 at first, OFT turns nothing, IA3's factors
    are 1."""
    return all(
        adapter.path is None and adapter.method not in PROMPTS and not adapter.pissa and not adapter.train_also
        for adapter in adapters
    )
