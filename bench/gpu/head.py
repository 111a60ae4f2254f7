"""The part `bench-head`: a head and its loss alone, forward and backward under bf16 autocast: logits all at once, the
slabs of `fused_loss`, and Liger's kernel where its package is installed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu.cases import Case
from bench.gpu.setting import Setting, installed

# rows, width, tokens of the vocabulary
SHAPES = ((16_384, 896, 128_256), (8_192, 2_048, 128_256), (4_096, 4_096, 128_256), (8_192, 1_024, 32_000))
SMALL = ((512, 16, 5_000),)
CALLS = 5


def cases(setting: Setting) -> list[Case]:
    shapes = SMALL if setting.small else SHAPES
    return [
        Case(f"{rows:,} x {width:,} over {tokens:,}", "head:measured", {"shape": [rows, width, tokens]}, seconds=40)
        for rows, width, tokens in shapes
    ]


def measured(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    """Returns the median seconds of each way, its peak bytes beyond the inputs, and the largest relative difference of
    its loss and gradients from those of logits all at once."""
    import torch

    del folder
    rows, width, tokens = given["shape"]
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device=setting.device).requires_grad_()
    weight = (0.02 * torch.randn(tokens, width, device=setting.device)).requires_grad_()
    targets = torch.randint(tokens, (rows,), device=setting.device)
    targets[::7] = -100

    def once(way: Callable[..., Any]) -> list[Any]:
        with torch.autocast(setting.device, torch.bfloat16):
            loss = way(hidden, weight, targets) / rows
        return [loss.detach(), *torch.autograd.grad(loss, [hidden, weight])]

    expected, found = once(_all_logits), {}
    for name, way in _ways().items():
        difference = max(
            float((one.float() - other.float()).norm() / other.float().norm())
            for one, other in zip(once(way), expected, strict=True)
        )
        found[name] = {"difference": difference, **_timed(lambda way=way: once(way), setting)}  # type: ignore[misc]
    return {"ways": found}


def _timed(work: Callable[[], Any], setting: Setting) -> dict[str, Any]:
    import torch

    from bench.gpu.speed import measured_memory

    wait = (lambda: None) if setting.small else torch.cuda.synchronize
    work()
    wait()
    held = 0 if setting.small else torch.cuda.memory_allocated()
    memory, seconds = measured_memory(setting.device), []
    for _ in range(CALLS):
        begun = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - begun)
    return {"seconds": statistics.median(seconds), "bytes": memory()["peak_bytes"] - held}


def _all_logits(hidden: Any, weight: Any, targets: Any) -> Any:
    from torch.nn import functional as F

    return F.cross_entropy(F.linear(hidden, weight).float(), targets, ignore_index=-100, reduction="sum")


def _ways() -> dict[str, Callable[..., Any]]:
    from drivetrain.models.fused_loss import linear_cross_entropy_sum

    ways: dict[str, Callable[..., Any]] = {
        "all logits": _all_logits,
        "slabs": lambda hidden, weight, targets: linear_cross_entropy_sum(hidden, weight, None, targets),
    }
    if installed("liger-kernel") is not None:
        ways["Liger's kernel"] = _liger
    return ways


def _liger(hidden: Any, weight: Any, targets: Any) -> Any:
    import torch
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

    cast = (hidden.to(torch.bfloat16), weight.to(torch.bfloat16))
    return Fused.apply(*cast, targets, None, None, -100, 0.0, 0.0, "sum")[0]
