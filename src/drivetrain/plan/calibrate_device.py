"""Measures the speed of this process's device by kind of operation and size: the points of a calibration.

Each point is (size of one call, seconds of one call). Sizes are floating-point operations for products, and bytes read
and written for the rest, each tensor once a call: as the costs of a step count them (plan/step_costs.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.measure.observer import Observer
from drivetrain.numerics.torch_precision import dtype as torch_dtype
from drivetrain.plan.calibrate_memory import measured_libraries
from drivetrain.plan.calibrate_repeats import EXTRA_SECONDS, Repeats
from drivetrain.plan.calibration import Curve, DeviceSpeeds, usual

SECONDS_A_POINT = 0.12  # measured for so long, and
LEAST_CALLS = 5  # at least so often
CALL_EXTRA_SECONDS = 6.0  # of tries of the start of an operation, by which a plan multiplies each one's number
SLOW = 0.5  # seconds of one call, after which no larger one is tried
MATMUL_SIZES = (32, 64, 128, 256, 512, 1024, 2048)
GPU_MATMUL_SIZES = (256, 1024, 2048, 4096, 8192)
# the smallest of each are those whose start is most of their time, which then is that of all smaller ones
LENGTHS = (4, 16, 64, 128, 256, 512, 1024)  # of attention
GPU_LENGTHS = (64, 512, 1024, 2048, 4096)
CONVOLUTIONS = ((4, 4), (8, 8), (16, 8), (32, 8), (16, 32), (64, 32), (128, 16), (256, 16))  # channels, pixels a side
GPU_CONVOLUTIONS = ((16, 8), (64, 16), (64, 56), (128, 28), (256, 14), (256, 56))
ELEMENTS = tuple(4**power for power in range(5, 13))  # 1 Ki to 16 Mi
GPU_ELEMENTS = tuple(4**power for power in range(7, 14))


def measured_speeds(device: torch.device, dtypes: Sequence[str], repeats: Repeats) -> DeviceSpeeds:
    """Returns the speeds of a device. dtypes: of products, by torch's names, and tfloat32 for float32 whose products
    the device rounds on the way in; those of float32 are not rounded.

    repeats: of the processes that measure at the same time.
    """
    clock = _Clock(device, repeats)
    libraries = measured_libraries() if device.type == "cpu" else {}  # before they are used for anything else
    return DeviceSpeeds(
        libraries=libraries,
        matmul=_by_type(_matmul, clock, dtypes),
        attention=_by_type(_attention, clock, dtypes),
        convolution=_by_type(_convolution, clock, dtypes),
        memory=_memory(clock),
        optimizer=_optimizer(clock),
        random=_random(clock),
        call_seconds=_call_seconds(clock),
    )


def _by_type(measure: Callable[[_Clock, torch.dtype], Curve], clock: _Clock, dtypes: Sequence[str]) -> dict[str, Curve]:
    found = {}
    for dtype in dtypes:
        with _rounding(dtype == "tfloat32"):
            found[dtype] = measure(clock, torch.float32 if dtype == "tfloat32" else torch_dtype(dtype))
    return found


@contextmanager
def _rounding(tf32: bool) -> Iterator[None]:
    """Sets both switches: PyTorch lets cuDNN round convolutions to tf32 by default, and products of matrices not."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


class _Clock:
    """Times calls on a device."""

    def __init__(self, device: torch.device, repeats: Repeats) -> None:
        self.device, self._repeats = device, repeats

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def seconds(self, call: Callable[[], object], extra_seconds: float = EXTRA_SECONDS) -> float:
        """Returns the seconds of a call, measured over some that follow each other as in a step."""
        call()
        return self._repeats.shortest(lambda: self._usual(call), extra_seconds)

    def _usual(self, call: Callable[[], object]) -> float:
        took = [self._once(call)]
        while len(took) < LEAST_CALLS or sum(took) < SECONDS_A_POINT:
            took.append(self._once(call))
            if sum(took) > SLOW * LEAST_CALLS:
                break
        return usual(took)

    def curve(self, cases: Iterator[tuple[float, Callable[[], object], int]]) -> Curve:
        """Returns the points of cases (size of one call, code, number of calls in the code)."""
        points = []
        for size, code, calls in cases:
            seconds = self.seconds(code)
            points.append((size, seconds / calls))
            if self._repeats.largest(seconds) > SLOW:
                break
        return tuple(sorted(points))

    def _once(self, call: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


def _matmul(clock: _Clock, dtype: torch.dtype) -> Curve:
    """Returns the times of Y = X W^T, and of its gradients dY W and dY^T X: the three products of a linear layer."""

    def cases() -> Iterator[tuple[float, Callable[[], object], int]]:
        for size in GPU_MATMUL_SIZES if clock.is_gpu else MATMUL_SIZES:
            x, w, dy = (torch.randn(size, size, device=clock.device).to(dtype) for _ in range(3))
            yield 2 * size**3, lambda x=x, w=w, dy=dy: (x @ w.t(), dy @ w, dy.t() @ x), 3  # type: ignore[misc]

    return clock.curve(cases())


def _attention(clock: _Clock, dtype: torch.dtype) -> Curve:
    """Returns the times of attention forward and backward: two products over pairs of positions, then five."""
    heads, width = (16, 64) if clock.is_gpu else (4, 64)

    def cases() -> Iterator[tuple[float, Callable[[], object], int]]:
        for length in GPU_LENGTHS if clock.is_gpu else LENGTHS:
            query, key, value = (
                torch.randn(4, heads, length, width, device=clock.device).to(dtype).requires_grad_() for _ in range(3)
            )
            flops = 2 * 4 * heads * length * length * width * (2 + 5)
            yield flops / 2, lambda q=query, k=key, v=value: _forward_backward(q, k, v), 2  # type: ignore[misc]

    return clock.curve(cases())


def _forward_backward(query: Tensor, key: Tensor, value: Tensor) -> None:
    out = F.scaled_dot_product_attention(query, key, value)
    torch.autograd.grad(out, (query, key, value), torch.ones_like(out))


def _convolution(clock: _Clock, dtype: torch.dtype) -> Curve:
    """Returns the times of 3 x 3 convolutions forward and backward, channels last."""

    def cases() -> Iterator[tuple[float, Callable[[], object], int]]:
        for channels, pixels in GPU_CONVOLUTIONS if clock.is_gpu else CONVOLUTIONS:
            layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False, device=clock.device, dtype=dtype)
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
            x = torch.randn(32, channels, pixels, pixels, device=clock.device).to(dtype)
            x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
            flops = 2 * 32 * channels * channels * 9 * pixels * pixels * 3  # forward, and two gradients in one call
            yield flops / 2, lambda x=x, layer=layer: layer(x).sum().backward(), 2  # type: ignore[misc]

    return clock.curve(cases())


def _memory(clock: _Clock) -> Curve:
    """Returns the times of operations that move bytes and compute little, in the mixture of a Transformer's block: sums
    of two tensors, products, activations, norms and their gradients."""

    def cases() -> Iterator[tuple[float, Callable[[], object], int]]:
        for elements in GPU_ELEMENTS if clock.is_gpu else ELEMENTS:
            x, y = (torch.randn(elements // 256, 256, device=clock.device) for _ in range(2))
            moved = 4 * elements * (3 + 3 + 2 + 2 + 2 + 3)
            yield moved / 6, lambda x=x, y=y: _mixture(x, y), 6  # type: ignore[misc]

    return clock.curve(cases())


def _mixture(x: Tensor, y: Tensor) -> None:
    total = x + y
    scaled = x * y
    active = F.gelu(total)
    normed = F.layer_norm(scaled, (256,))
    active.clone()
    torch.ops.aten.gelu_backward(normed, total)


def _optimizer(clock: _Clock) -> Curve:
    """Returns the times of AdamW's step over many tensors; a call is the step of one tensor, which reads parameter,
    gradient and two moments, and writes three of them."""

    def cases() -> Iterator[tuple[float, Callable[[], object], int]]:
        for elements in (GPU_ELEMENTS if clock.is_gpu else ELEMENTS)[::2]:
            count = max(1, min(32, 2**24 // elements))
            parameters = [nn.Parameter(torch.randn(elements, device=clock.device)) for _ in range(count)]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer = torch.optim.AdamW(parameters, lr=1e-6)
            yield 4 * 7 * elements, optimizer.step, count

    return clock.curve(cases())


def _random(clock: _Clock) -> Curve:
    """Returns the times of dropout: a mask of random numbers, and a product with it."""

    def cases() -> Iterator[tuple[float, Callable[[], object], int]]:
        for elements in (GPU_ELEMENTS if clock.is_gpu else ELEMENTS)[::2]:
            x = torch.randn(elements, device=clock.device)
            yield 4 * elements * 2, lambda x=x: F.dropout(x, 0.1), 1  # type: ignore[misc]

    return clock.curve(cases())


class _Calls(Observer):
    """Counts the operators that run inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def _observe(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        del args, kwargs, result
        self.count += not func.is_view


def _call_seconds(clock: _Clock) -> float:
    """Returns the time between the starts of two kernels of a model whose tensors are too small to matter."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(16)]
    model = nn.Sequential(*layers).to(clock.device)
    x = torch.randn(8, 8, device=clock.device)
    with _Calls() as seen:
        model(x).sum().backward()

    def passes() -> None:
        model.zero_grad(set_to_none=True)  # else each gradient is added to the last, which was not counted
        model(x).sum().backward()

    return clock.seconds(passes, CALL_EXTRA_SECONDS) / seen.count
