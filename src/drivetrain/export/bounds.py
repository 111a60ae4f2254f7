"""How far an export may be from the run's model, by the numbers that its weights are kept in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """relative: of comparison.Difference. kl: its mean. answers: whether an answer may differ only where two tokens
    were as likely."""

    relative: float
    kl: float
    answers: bool = True


# fp32: other kernels add in another order. 16 bits: bf16 keeps 8 bits of a number, fp16 11, and each layer rounds its
# results again. 8 bits and fewer: the weights themselves are other ones, so answers are reported and not judged. In
# blocks of 32 (q8_0, q5_0, q4_0) models of random weights, the worst there are, came to 0.04, 0.21 and 0.47, and to KL
# divergences of 0.002, 0.06 and 0.27; in int4 and nf4 to 0.40 and 0.41, and to
# 0.19 and 0.20.
BOUNDS = {
    "fp32": Bound(1e-3, 1e-5),
    "bf16": Bound(0.06, 0.01),
    "fp16": Bound(0.01, 1e-3),
    "int8": Bound(0.1, 0.02, answers=False),
    "fp8": Bound(0.15, 0.05, answers=False),
    "int4": Bound(0.6, 0.4, answers=False),
    "nf4": Bound(0.6, 0.4, answers=False),
    "q8_0": Bound(0.1, 0.02, answers=False),
    "q5_0": Bound(0.3, 0.1, answers=False),
    "q4_0": Bound(0.6, 0.4, answers=False),
}
MERGE = 1e-4  # of the scores' spread: a merged model beside the same with its adapters apart, both in fp32
TIES = 8  # times the largest difference of scores: a margin below it is rounding's to decide
