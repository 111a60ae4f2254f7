"""Attention within each sequence of packed rows as one operator, which a compiler takes as it is.

Traced through, a loop over sequences would break the graph in every layer, and be compiled anew for every set of
lengths. As an operator of its own (torch.library.custom_op) it is one node, whose lengths are read when it runs: so a
block is one graph, whatever the rows hold. The kernels are those that PyTorch's attention takes on a CPU, which keep
their own logarithms of sums for the backward pass.

A branch, which shares the first positions of the sequence before it (`data.branches`), is computed in two calls: all of
its queries look at the shared keys, together with those of other branches that share them, and each at the branch's own
up to its place. With o₁, o₂ their outputs and s₁, s₂ their logarithms of sums, s = log(exp s₁ + exp s₂) is that of
both, and o₁ exp(s₁ - s) + o₂ exp(s₂ - s) the output. The kernel of the backward pass makes weights from s: with the s
of both it gives each call's part of the gradients. So no mask is made, and no key copied. (The way in which Ring
Attention joins blocks: Liu et al. 2023, section 3.)

Numbers of 16 bits are computed with in fp32, sequence by sequence (branches of one together), and rounded afterwards;
what is kept for the backward pass has 16 bits. PyTorch's kernel for 16 bits compiles code for each length that it meets
and keeps it: 150 sequences of 50 to 1,000 positions (4 heads of 64, two cores of an AMD EPYC) left 1.1 GiB behind and
took 1.43 s in the backward pass, in fp32 8 MiB and 1.05 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.errors import RunError
from drivetrain.memory.transfers import on_host

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_apart(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, window: int | None, scale: float | None
) -> Tensor:
    """Returns (B, T, heads, width). query: (B, heads, T, width); key and value may have fewer heads.

    bounds: from `packed_attention.bounds_of`. window: positions that each sees, itself included; None: all before it.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    found: Tensor = _attend(query, key, value, bounds, window or 0, scale)[0]
    return found.transpose(1, 2)


@torch.library.custom_op("drivetrain::attend_apart", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns attention's output, (B, heads, T, width), and logarithms of sums, (B, heads, T) fp32.

    window: 0 for none.
    """
    given, sums = _empty(query)
    for row, bounds_of_each, trunk in _groups(bounds, window):
        whole = slice(bounds_of_each[0], bounds_of_each[-1])
        tensors = [_part(tensor, row, whole) for tensor in (query, key, value)]
        each = [
            _FORWARD(
                *(tensor[:, :, own] for tensor in tensors), 0.0, **_how(own.stop - own.start, window, scale, tensors[0])
            )
            for own in _within(bounds_of_each)
        ]
        found, its_sums = each[0] if len(each) == 1 else (torch.cat(parts, 2) for parts in zip(*each, strict=True))
        if trunk is not None:
            shared = [_part(tensor, row, trunk) for tensor in (key, value)]
            found, its_sums = _joined(found, its_sums, *_FORWARD(tensors[0], *shared, 0.0, False, scale=scale))
        given[row : row + 1, :, whole] = found
        sums[row : row + 1, :, whole] = its_sums
    return given, sums


def _joined(found: Tensor, sums: Tensor, other: Tensor, its_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Returns output and logarithms of sums over the keys of both calls."""
    both = torch.logaddexp(sums, its_sums)
    weights = ((each - both).exp().unsqueeze(-1) for each in (sums, its_sums))
    return sum(weight * part for weight, part in zip(weights, (found, other), strict=True)), both  # type: ignore[return-value]


@_attend.register_fake
def _attend_fake(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    del key, value, bounds, window, scale
    return _empty(query)


@torch.library.custom_op("drivetrain::attend_apart_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: Tensor,
    sums: Tensor,
    bounds: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of query, key and value, (B, heads, T, width) each."""
    gradients = tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in (query, key, value))
    for row, bounds_of_each, trunk in _groups(bounds, window):
        whole = slice(bounds_of_each[0], bounds_of_each[-1])
        tensors = [_part(tensor, row, whole) for tensor in (gradient, query, key, value, given)]
        its_sums = sums[row : row + 1, :, whole]
        each = []
        for own in _within(bounds_of_each):
            how = _how(own.stop - own.start, window, scale, tensors[0])
            parts = [tensor[:, :, own] for tensor in (*tensors, its_sums)]
            each.append(_BACKWARD(*parts, 0.0, how.pop("is_causal"), **how))
        found = list(each[0]) if len(each) == 1 else [torch.cat(parts, 2) for parts in zip(*each, strict=True)]
        if trunk is not None:
            shared = [_part(tensor, row, trunk) for tensor in (key, value)]
            more, *of_shared = _BACKWARD(*tensors[:2], *shared, tensors[-1], its_sums, 0.0, False, scale=scale)
            found[0] = found[0] + more
            for made, part in zip(gradients[1:], of_shared, strict=True):  # the trunk's own came before
                made[row : row + 1, :, trunk] += part
        for made, part in zip(gradients, found, strict=True):
            made[row : row + 1, :, whole] = part
    return gradients[0], gradients[1], gradients[2]


@_backward.register_fake
def _backward_fake(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    del gradient, others
    made = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (query, key, value)]
    return made[0], made[1], made[2]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bounds, window, scale = inputs
    ctx.save_for_backward(query, key, value, *output, bounds)
    ctx.window, ctx.scale = window, scale


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    query, key, value, given, sums, bounds = ctx.saved_tensors
    found = _backward(gradient, query, key, value, given, sums, bounds, ctx.window, ctx.scale)
    return (*found, None, None, None)


_attend.register_autograd(_differentiate, setup_context=_save)


def _empty(query: Tensor) -> tuple[Tensor, Tensor]:
    """Allocates rows by position, the order in which the layer after attention reads them."""
    batch, heads, length, width = query.shape
    given = torch.empty(batch, length, heads, width, dtype=query.dtype, device=query.device).transpose(1, 2)
    return given, torch.empty(batch, heads, length, dtype=torch.float32, device=query.device)


def _groups(bounds: Tensor, window: int) -> Iterator[tuple[int, list[int], slice | None]]:
    """Yields sequences that have a length: their row, their bounds one behind another, and None; or branches that
    share the same positions, with what they share. Raises RunError where a branch is longer than the window."""
    own = on_host(bounds)[:, :, 0]
    for row, places in enumerate(own[:, 0].tolist()):
        firsts = own[row, 1].tolist() if own.shape[1] == 2 else [0] * len(places)
        root, found, shared = 0, list[int](), 0
        for (begin, end), first in zip(pairwise(places), firsts[:-1], strict=True):
            if end <= begin:
                continue
            if first and window and first + end - begin > window:
                raise RunError(f"answers that share a prompt: {first + end - begin} tokens, and a window of {window}")
            if found and first and first == shared:
                found.append(end)
                continue
            if found:
                yield row, found, slice(root, root + shared) if shared else None
            root, found, shared = root if first else begin, [begin, end], first
        if found:
            yield row, found, slice(root, root + shared) if shared else None


def _within(bounds: list[int]) -> list[slice]:
    """Returns where each sequence of a group lies within it."""
    return [slice(begin - bounds[0], end - bounds[0]) for begin, end in pairwise(bounds)]


def _part(tensor: Tensor, row: int, places: slice) -> Tensor:
    """Returns these positions in the dtype that is computed in."""
    part = tensor[row : row + 1, :, places].to(torch.promote_types(tensor.dtype, torch.float32))
    return part if part.stride(3) == 1 else part.contiguous()


def _how(length: int, window: int, scale: float, like: Tensor) -> dict[str, Any]:
    """Returns the kernels' arguments beside tensors: causal, or a mask if the window is shorter than the sequence."""
    if not window or length <= window:
        return {"is_causal": True, "scale": scale}
    behind = np.arange(length)[:, None] - np.arange(length)
    hidden = torch.from_numpy((behind < 0) | (behind >= window))
    mask = torch.zeros(1, 1, length, length, dtype=like.dtype).masked_fill_(hidden, -torch.inf)
    return {"is_causal": False, "attn_mask": mask, "scale": scale}
