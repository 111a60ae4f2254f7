"""A frozen base in few bits, under adapters (QLoRA)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from drivetrain.config.base import Frozen, doc
from drivetrain.errors import Problem


class QuantisedBase(Frozen):
    format: Literal["nf4", "int8"] = doc("nf4: 4 bits a weight (QLoRA); int8: 8 bits, nearer to the weights")
    double: bool = doc("nf4: quantise the scales too: 4.13 bits a weight instead of 4.5", True)


def _named(given: Any) -> Any:
    return {"format": given} if isinstance(given, str) else given


QuantisedBaseBlock = Annotated[QuantisedBase, BeforeValidator(_named)]


def quantised_base_problems(base: QuantisedBase, has_adapter: bool) -> Iterator[Problem]:
    """What contradicts itself, without a look at any model."""
    if not has_adapter:
        why = "a quantised base is frozen, and without an adapter nothing would be trained"
        yield Problem("quantised_base", why, "give an adapter, or leave it out")
    if base.format != "nf4" and "double" in base.model_fields_set:
        why = f"it is of nf4, and quantised_base.format is {base.format}"
        yield Problem("quantised_base.double", why, "leave it out")
