"""Quantisation-aware training: linear layers compute with the weights that they will have once they are quantised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from drivetrain.config.adapter import Adapter
from drivetrain.config.base import Frozen, doc
from drivetrain.config.precision import Precision
from drivetrain.config.quantised import GroupSize
from drivetrain.errors import Problem

FIELD = "quantisation_aware"


class QuantisationAware(Frozen):
    format: Literal["int8-dynamic-int4-weight", "int4-weight", "int8-weight"] = doc(
        "Format of the quantised model: int8-dynamic-int4-weight (inputs in 8 bits too), int4-weight, int8-weight"
    )
    group_size: GroupSize = doc("4 bits: weights of a row that share a scale", 32)


def _named(given: Any) -> Any:
    return {"format": given} if isinstance(given, str) else given


QuantisationAwareBlock = Annotated[QuantisationAware, BeforeValidator(_named)]


def quantisation_aware_problems(
    block: QuantisationAware, precision: Precision, adapters: Sequence[Adapter], has_codes: bool
) -> Iterator[Problem]:
    """Yields the contradictions within the block. has_codes: the base is quantised already."""
    if block.format == "int8-weight" and block.group_size != 32:
        yield Problem(f"{FIELD}.group_size", "int8-weight has a scale for each row, and no groups", "leave it out")
    if has_codes:
        why = "quantised_base keeps codes already: there are no weights left that could be trained to be quantised"
        yield Problem(FIELD, why, "leave one of the two out")
    if precision.layers is not None:
        why = f"{precision.name} rounds the same products in another way than the quantised model will"
        yield Problem(FIELD, why, "give precision=bf16-mixed")
    for key, why in (
        ("dora", "DoRA would measure the weights as they are, not as they will be once quantised"),
        ("pissa", "PiSSA changes the weights that are quantised, and its file is of the base as it was"),
    ):
        if any(getattr(adapter, key) or (key == "dora" and adapter.saved_as_dora) for adapter in adapters):
            yield Problem(f"adapter.{key}", why, f"leave it or {FIELD} out")
