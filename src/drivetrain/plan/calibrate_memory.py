"""Measures what libraries take on a CPU once they are used: code that is read from disk at its first call, buffers of
each thread, generated kernels. No trace sees it, and of a small run it is most."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.memory.shortage import give_back
from drivetrain.runtime.library_messages import hush

IMPORTED = ("drivetrain.training.run", "transformers.models.llama.modeling_llama", "peft", "deepspeed")


def measured_libraries() -> dict[str, int]:
    """Returns the resident bytes that the first training step with operations of each kind leaves behind in this
    process, which has computed nothing before; "step": those that any step has; "imports": those of a process that has
    imported what the trainings of this installation may need."""
    found, start = {}, _resident()
    with torch.device("meta"):
        _train(nn.Linear(8, 8), torch.empty(8, 8))  # imports what the first step of an optimizer does, no more
    for kind, take in _STEPS.items():
        before = _resident()
        take()
        found[kind] = max(0, _resident() - before)
    before = _resident()
    hush()
    for name in IMPORTED:
        with suppress(Exception):  # it is not installed, or not for this machine
            import_module(name)
    found["imports"] = start + max(0, _resident() - before)
    return found


def _resident() -> int:
    give_back()
    return psutil.Process().memory_info().rss


def _step() -> None:
    """Takes what steps of any kind have: tokens and their order, norms, activations, masks, sums, a loss, clipping."""
    layers = nn.Sequential(nn.Embedding(64, 32), nn.LayerNorm(32), nn.Linear(32, 64))
    tokens = torch.randint(64, (4, 32))
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(2):
        found = F.dropout(F.silu(layers(tokens)), 0.1)
        angles = torch.cat([found.cos(), found.sin()], dim=-1).split(64, dim=-1)[0]
        scaled = F.gelu(angles) * (found.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() + torch.tanh(found)
        order = tokens.flatten().sort(stable=True).indices
        hidden = torch.ones(32, 32, dtype=torch.bool).triu(1)
        weights = (scaled @ scaled.transpose(1, 2)).masked_fill(hidden, -torch.inf).softmax(-1)
        scores = (weights @ scaled).bfloat16().float().flatten(0, 1)[order]
        F.cross_entropy(scores, tokens.flatten()[order]).backward()
        nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        optimizer.step()
        torch.stack([scores.double().sum(), tokens.cumsum(1).amax()]).isfinite().all().item()


def _matmul() -> None:
    _train(nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 512)), torch.randn(512, 512))


def _attention() -> None:
    query = torch.randn(2, 4, 256, 64, requires_grad=True)
    F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()


def _convolution() -> None:
    """Takes what a ResNet has: strides, pooling and norms, forward and backward."""
    layers = nn.Sequential(
        nn.Conv2d(3, 16, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 32, 1, stride=2, bias=False),
        nn.AdaptiveAvgPool2d(1),
    )
    _train(layers, torch.randn(32, 3, 32, 32).contiguous(memory_format=torch.channels_last))


def _train(model: nn.Module, samples: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(samples).square().mean().backward()
        optimizer.step()


_STEPS: dict[str, Callable[[], None]] = {
    "step": _step,
    "matmul": _matmul,
    "attention": _attention,
    "convolution": _convolution,
}
