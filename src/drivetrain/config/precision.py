"""The precisions as data: which dtype parameters are kept in, which one computes, and whether the loss is scaled.

Names follow the field: `bf16-mixed` and `fp16-mixed` are autocast over fp32 parameters; `bf16` and `fp16` keep and
compute everything in that type; `bf16-master` and `fp16-master` compute with copies of fp32 weights in that type
(Micikevicius et al. 2018; what FSDP's MixedPrecisionPolicy and DeepSpeed's bf16 and fp16 do); `fp8-mixed` is
`bf16-mixed` with the products of linear layers in 8 bits (models/fp8.py). An engine translates the table; it never asks
for a precision by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PrecisionName = Literal[
    "fp32", "tf32", "fp16", "bf16", "fp16-mixed", "bf16-mixed", "fp8-mixed", "fp16-master", "bf16-master"
]


FP8_FROM = (8, 9)  # compute capability: below, GPUs have no products of 8-bit floats


@dataclass(frozen=True)
class Need:
    """Requirements of a precision on the device, beyond arithmetic, which a CPU can always emulate."""

    devices: tuple[str, ...] = ("cpu", "cuda")
    compute_capability: tuple[int, int] = (0, 0)
    nvidia_only: bool = False  # of other makers' GPUs it is not known which generation has it


@dataclass(frozen=True)
class Precision:
    """dtypes by their torch names, so that the table can be read without torch."""

    name: str
    parameters: str
    compute: str  # dtype of matrix products and convolutions
    autocast: bool  # compute differs from parameters by autocast's op list
    scaled: bool  # the loss is scaled, and a step that overflows is skipped
    cast: bool = False  # parameters are copied to `compute` for use; updates are made in their own dtype
    tf32: bool = False  # fp32 products may be rounded to tf32 on the way in
    layers: str | None = None  # the module whose linear layers take the place of the model's, for 8-bit products
    package: str | None = None  # the optional package that it needs
    casting_once: str | None = None  # the precision that casts weights once a step instead of in each forward pass
    needs: Need = Need()

    @property
    def significant_bits(self) -> int:
        """Bits of a number's significand in products (IEEE 754; bfloat16 and tf32 as their makers define them): of two
        precisions the one with fewer rounds more."""
        return 4 if self.layers else 11 if self.tf32 else SIGNIFICANT_BITS[self.compute]


SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}
_FP16, _BF16 = Need(compute_capability=(5, 3)), Need(compute_capability=(8, 0))
_TF32 = Need(("cuda",), (8, 0), nvidia_only=True)
_FP8 = Need(("cuda",), FP8_FROM, nvidia_only=True)

PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", "float32", "float32", autocast=False, scaled=False),
        Precision("tf32", "float32", "float32", autocast=False, scaled=False, tf32=True, needs=_TF32),
        Precision("fp16", "float16", "float16", autocast=False, scaled=False, needs=_FP16),
        Precision("bf16", "bfloat16", "bfloat16", autocast=False, scaled=False, needs=_BF16),
        Precision("fp16-mixed", "float32", "float16", autocast=True, scaled=True, needs=_FP16),
        Precision(
            "bf16-mixed",
            "float32",
            "bfloat16",
            autocast=True,
            scaled=False,
            casting_once="bf16-master",
            needs=_BF16,
        ),
        Precision(
            "fp8-mixed",
            "float32",
            "bfloat16",
            autocast=True,
            scaled=False,
            layers="drivetrain.models.fp8",
            package="torchao",
            needs=_FP8,
        ),
        Precision("fp16-master", "float32", "float16", autocast=False, scaled=True, cast=True, needs=_FP16),
        Precision("bf16-master", "float32", "bfloat16", autocast=False, scaled=False, cast=True, needs=_BF16),
    )
}
