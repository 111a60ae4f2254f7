"""Measures collectives between the processes of a group, by kind and size."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.plan.calibrate_device import SECONDS_A_POINT
from drivetrain.plan.calibrate_repeats import Repeats
from drivetrain.plan.calibration import Curve, usual

BYTES = tuple(4**power for power in range(5, 13))  # 1 KiB to 16 MiB
GPU_BYTES = tuple(4**power for power in range(7, 15))
REPETITIONS, MOST_REPETITIONS = 7, 200  # as many as fit into SECONDS_A_POINT: the kernel counts other programs in 10 ms

# torch 2.13 has new names for them, and warns at the old ones
_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def measured_collectives(device: torch.device, repeats: Repeats) -> dict[str, Curve]:
    """Returns the seconds of each collective by its bytes: those of the whole tensor that is reduced, or that results,
    as `Messages` counts them (plan/step_costs.py)."""
    sizes = GPU_BYTES if device.type == "cuda" else BYTES
    return {
        name: tuple((size, _seconds(make(torch.zeros(size // 4, device=device)), device, repeats)) for size in sizes)
        for name, make in _COLLECTIVES.items()
    }


def _seconds(call: Callable[[], object], device: torch.device, repeats: Repeats) -> float:
    call()
    longest = repeats.largest(_once(call, device))
    number = min(MOST_REPETITIONS, max(REPETITIONS, int(SECONDS_A_POINT / longest)))
    return repeats.shortest(lambda: usual([_once(call, device) for _ in range(number)]))


def _once(call: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _all_reduce(whole: Tensor) -> Callable[[], object]:
    return lambda: dist.all_reduce(whole)


def _all_gather(whole: Tensor) -> Callable[[], object]:
    own = whole.chunk(dist.get_world_size())[0].clone()
    return lambda: _gather(whole, own)


def _reduce_scatter(whole: Tensor) -> Callable[[], object]:
    own = whole.chunk(dist.get_world_size())[0].clone()
    return lambda: _scatter(own, whole)


def _all_to_all(whole: Tensor) -> Callable[[], object]:
    out = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(out, whole)


def _broadcast(whole: Tensor) -> Callable[[], object]:
    return lambda: dist.broadcast(whole, 0)


def _send(whole: Tensor) -> Callable[[], object]:
    rank, world = dist.get_rank(), dist.get_world_size()
    return lambda: dist.send(whole, 1) if rank == 0 else dist.recv(whole, 0) if rank == world - 1 else None


_COLLECTIVES: dict[str, Callable[[Tensor], Callable[[], object]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send": _send,
}
