"""A frozen base in few bits, under adapters (QLoRA)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from drivetrain.config.base import Frozen, doc
from drivetrain.errors import Problem

GroupSize = Literal[32, 64, 128, 256]  # torchao's kernels know these
# A format names its library: only int8 exists twice, and a key for the library would mostly have one value.
LIBRARIES = {"nf4": "bitsandbytes", "int8": "bitsandbytes", "int4": "torchao", "int8-torchao": "torchao"}


class QuantisedBase(Frozen):
    format: Literal["nf4", "int8", "int4", "int8-torchao"] = doc(
        "nf4: 4 bits a weight (QLoRA); int8: 8 bits, nearer to the weights; int4, int8-torchao: torchao's, weights only"
    )
    double: bool = doc("nf4: quantise the scales too: 4.13 bits a weight instead of 4.5", True)
    group_size: GroupSize = doc("int4: weights of a row that share a scale", 128)

    @property
    def library(self) -> str:
        return LIBRARIES[self.format]

    @property
    def numbers(self) -> dict[str, Any]:
        """The fields that decide the values of the base's weights."""
        own = {"group_size": self.group_size} if self.format == "int4" else {}
        return {"format": self.format, "double": self.double, **own}


def _named(given: Any) -> Any:
    return {"format": given} if isinstance(given, str) else given


QuantisedBaseBlock = Annotated[QuantisedBase, BeforeValidator(_named)]


def quantised_base_problems(base: QuantisedBase, has_adapter: bool) -> Iterator[Problem]:
    """Yields the contradictions within the block, without a look at any model. Fields at their defaults do not count,
    since resolved run files spell them out."""
    if not has_adapter:
        why = "a quantised base is frozen, and without an adapter nothing would be trained"
        yield Problem("quantised_base", why, "give an adapter, or leave it out")
    of_formats = (("double", "nf4", not base.double), ("group_size", "int4", base.group_size != 128))
    for key, its_format, is_set in of_formats:
        if is_set and base.format != its_format:
            why = f"it is of {its_format}, and quantised_base.format is {base.format}"
            yield Problem(f"quantised_base.{key}", why, "leave it out")
