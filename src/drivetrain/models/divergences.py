"""Computes divergences between two models' distributions over tokens, from existing logits.

Plain operations would keep several tensors of the logits' size. Here one waits for the backward pass, and all else is
made some rows at a time: of fp32 logits their gradient waits in their place, of 16-bit logits both models' logits.

With student q, teacher p and a function h of both, the gradient of each divergence by the student's logits is
q (h - Σ q h): h is -p / q of the forward KL, log(q / p) of the reverse one, and (1 - β) log(q / m) of Jensen-Shannon's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from drivetrain.models.cross_entropy import rows_at_once

Kind = Literal["forward_kl", "reverse_kl", "js"]
LEAST = -1e30  # logarithm that stands for that of 0: 0 times it is 0


@dataclass(frozen=True)
class Divergence:
    """The divergence of a student's distribution q from a teacher's p, both softmax(logits / temperature).

    forward_kl: KL(p || q). reverse_kl: KL(q || p). js: the generalised Jensen-Shannon divergence β KL(p || m) +
    (1 - β) KL(q || m) with m = β p + (1 - β) q (Agarwal et al. 2024, "On-Policy Distillation of Language Models",
    equation 1). None is multiplied by the temperature's square, as Hinton et al. 2015 do.
    """

    kind: Kind
    beta: float = 0.5
    temperature: float = 1.0

    def of_rows(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the divergence of each row, (N,), and its gradient by the student's logits, (N, V), in fp32."""
        own, other = self._logarithms(student), self._logarithms(teacher)
        shares, wanted = own.exp(), other.exp()
        if self.kind == "forward_kl":
            change = shares - wanted
            return _kl(wanted, other - own, change), change / self.temperature
        if self.kind == "reverse_kl":
            gaps = own - other
            inner = (shares * gaps).sum(1)
            return _kl(shares, gaps, wanted - shares), shares * (gaps - inner[:, None]) / self.temperature
        of_student = 1 - self.beta
        mixed = torch.logaddexp(own + math.log(of_student), other + math.log(self.beta))
        middle, gaps = mixed.exp(), own - mixed
        found = self.beta * _kl(wanted, other - mixed, middle - wanted)
        found += of_student * _kl(shares, gaps, middle - shares)
        inner = (shares * gaps).sum(1)
        return found, of_student * shares * (gaps - inner[:, None]) / self.temperature

    def _logarithms(self, logits: Tensor) -> Tensor:
        return (logits.float() / self.temperature).log_softmax(1).clamp(min=LEAST)


def _kl(shares: Tensor, gaps: Tensor, missing: Tensor) -> Tensor:
    """Returns KL(a || b) of each row. shares: a. gaps: log a - log b. missing: b - a, whose sum is 0.

    With it each term is at least 0. Without it a small divergence is the difference of large terms, and the rounding
    of the logarithms' normaliser, 5e-7, would be all of a divergence of 1e-7.
    """
    return torch.addcmul(missing, shares, gaps).sum(1)


@torch.compiler.disable
def divergences(student: Tensor, teacher: Tensor, measure: Divergence) -> Tensor:
    """Returns the divergence of each row, (N,) fp32, with the student's gradients, which cannot be differentiated.

    student, teacher: logits (N, V), (N, W). Where V and W differ, what the wider head has beyond the other's tokens is
    left out: rows that some models have for round sizes.
    """
    student, teacher = (each.full_tensor() if isinstance(each, DTensor) else each for each in (student, teacher))
    width = min(student.shape[1], teacher.shape[1])
    student, teacher = (each if each.shape[1] == width else each[:, :width] for each in (student, teacher))
    found: Tensor = _Divergences.apply(student, teacher, measure)
    return found


class _Divergences(torch.autograd.Function):
    """The autograd function. The gradient of fp32 logits is kept from the forward pass; that of 16-bit ones is made in
    the backward pass, since fp16 cannot hold it before it is scaled."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, measure: Divergence) -> Tensor:
        rows = rows_at_once(student)
        keeps = student.dtype == torch.float32
        gradient = torch.empty_like(student) if keeps and student.requires_grad else None
        losses = torch.empty(len(student), dtype=torch.float32, device=student.device)
        for start in range(0, len(student), rows):
            own = slice(start, start + rows)
            losses[own], change = measure.of_rows(student[own], teacher[own])
            if gradient is not None:
                gradient[own] = change
        ctx.save_for_backward(*((gradient,) if keeps else (student, teacher)))
        ctx.measure, ctx.keeps = measure, keeps
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if ctx.keeps:
            return ctx.saved_tensors[0] * upstream[:, None], None, None
        student, teacher = ctx.saved_tensors
        rows, scaled = rows_at_once(student), torch.empty_like(student)
        for start in range(0, len(student), rows):
            own = slice(start, start + rows)
            scaled[own] = ctx.measure.of_rows(student[own], teacher[own])[1] * upstream[own, None]
        return scaled, None, None
