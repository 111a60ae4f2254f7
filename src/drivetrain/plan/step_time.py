"""The time of a step: operations by the roofline, collectives over the links, what overlaps, the pipeline's bubble."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from drivetrain.plan.collectives import sent_bytes
from drivetrain.plan.speeds import CallTime, Speeds
from drivetrain.plan.step_costs import Messages, Operations, StepCosts

ON_HOST = ("host", "update_copy", "processor")  # kinds of operations that take no time of the device itself
Bound = Literal["compute", "memory", "network", "start", "bubble", "host", "data"]

# the part of a step's computing beside which an axis' messages travel: gradients are reduced in the backward pass,
# which is two thirds of it; shards are gathered and scattered in both passes; the others are waited for where they are
# needed
BESIDE = {"dp": 2 / 3, "shard": 1.0}
# of the time of messages that computing hides, the share by which they slow it: they take processors and memory from
# it. Fitted to MPT 13b on 64 H100 in bench/results/published.md
SLOWED = 0.4
RECOMPUTES = 4 / 3  # FLOPs of a step that computes each block twice forward


@dataclass(frozen=True)
class Circumstances:
    """The facts that decide a step's time beside its costs."""

    stages: int = 1
    micro_batches: int = 1
    causal: bool = False  # half of the pairs of positions are masked, which attention's kernels leave out
    recomputes: bool = False  # blocks are computed twice forward
    overlaps: bool = True  # the engine sends while it computes
    fused: float = 1.0  # share of the bytes of element-wise operations that is left after compiling
    program: float = 0.0  # the engine's own, between its messages: starts of so many operations for each of them
    data_seconds: float = 0.0  # loading a step's samples, in the background
    products: Mapping[str, str] = field(default_factory=dict)  # type of tensors → type that products compute in
    dtype: str = "float32"  # of the products, for MFU


@dataclass(frozen=True)
class StepTime:
    """Planned seconds of a step, and what they are made of."""

    seconds: float
    compute: float  # products, attention, convolutions
    memory: float  # what moves bytes
    start: float  # the device waits for the program
    network: float  # all messages
    waited: float  # messages that nothing hides
    bubble: float  # a pipeline's idle time
    host: float  # waiting for the host: its processor, copies at the update, others beyond the computing beside them
    data: float  # waiting for samples
    bound_by: Bound
    sent_by_axis: Mapping[str, float] = field(default_factory=dict)  # bytes that a rank sends
    flops: float = 0.0  # of one rank
    mfu: float | None = None  # share of the peak that the model's own products reach; None without products


def step_time(costs: StepCosts, speeds: Speeds, given: Circumstances | None = None) -> StepTime:
    """Returns the time of a step whose costs are known, on a machine whose speeds are known."""
    given = given or Circumstances()
    here = (each for each in costs.operations if each.kind not in ON_HOST)
    busy = sum((speeds.operation(_as_run(each, given)) for each in here), CallTime(0.0, 0.0, 0.0))
    working = busy.compute + busy.memory
    program = given.program * sum(each.calls for each in costs.messages) * speeds.call_seconds
    busy = replace(busy, start=busy.start + program)
    start = max(0.0, busy.start - working) if speeds.starts_ahead else busy.start
    network = sum(map(speeds.messages, costs.messages))
    waited = _waited(costs, speeds, working + start, given)
    bubble = (working + start + waited) * (given.stages - 1) / max(1, given.micro_batches)
    copies = sum(speeds.to_host(each) for each in costs.operations if each.kind == "host")
    stalls = _stalls(costs, speeds)
    host = max(0.0, copies - working - start) + stalls
    seconds = working + start + waited + bubble + host
    data = max(0.0, given.data_seconds - seconds)
    parts: dict[Bound, float] = {
        "compute": busy.compute,
        "memory": busy.memory,
        "network": waited,
        "start": busy.start if start else 0.0,  # of which the device waits for a part
        "bubble": bubble,
        "host": stalls + (copies if host > stalls else 0.0),
        "data": given.data_seconds if data else 0.0,
    }
    flops = sum(each.flops for each in costs.operations)
    return StepTime(
        seconds=seconds + data,
        compute=busy.compute,
        memory=busy.memory,
        start=start,
        network=network,
        waited=waited,
        bubble=bubble,
        host=host,
        data=data,
        bound_by=max(parts, key=lambda name: parts[name]),
        sent_by_axis=_sent(costs),
        flops=flops,
        mfu=_mfu(flops, seconds + data, speeds, given),
    )


def _stalls(costs: StepCosts, speeds: Speeds) -> float:
    """Returns the seconds in which the device waits for its host: for an update of the processor's, and its copies."""
    copies = sum(speeds.to_host(each) for each in costs.operations if each.kind == "update_copy")
    return copies + sum(speeds.processor(each) for each in costs.operations if each.kind == "processor")


def _as_run(operations: Operations, given: Circumstances) -> Operations:
    """Returns the operations as a device runs them: attention without masked pairs, products in their own type, fused
    element-wise operations."""
    if operations.kind == "attention":
        return replace(operations, flops=operations.flops / 2) if given.causal else operations
    if operations.kind in ("matmul", "convolution"):
        return replace(operations, dtype=given.products.get(operations.dtype, operations.dtype))
    if operations.kind == "memory" and given.fused != 1.0:
        calls = max(1, round(operations.calls * given.fused))
        return replace(operations, calls=calls, bytes=operations.bytes * given.fused)
    return operations


def _waited(costs: StepCosts, speeds: Speeds, working: float, given: Circumstances) -> float:
    """Returns the seconds of messages that nothing hides: those beyond the computing beside them, and of each axis one
    call, before or after which there is nothing to compute."""
    by_axis: dict[str, list[Messages]] = {}
    for each in costs.messages:
        by_axis.setdefault(each.axis, []).append(each)
    waited = 0.0
    for axis, messages in by_axis.items():
        took = sum(map(speeds.messages, messages))
        beside = BESIDE.get(axis, 0.0) if speeds.sends_beside_computing and given.overlaps else 0.0
        calls = sum(each.calls for each in messages)
        alone = took / calls if calls else 0.0
        hidden = min(beside * working, took)
        waited += max(alone, took - hidden + SLOWED * hidden) if beside else took
    return waited


def _sent(costs: StepCosts) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in costs.messages:
        found[each.axis] = found.get(each.axis, 0.0) + sent_bytes(each)
    return found


def _mfu(flops: float, seconds: float, speeds: Speeds, given: Circumstances) -> float | None:
    """Returns the model's FLOPs a second, without recomputing, over the peak (Chowdhery et al. 2022, PaLM, appendix
    B)."""
    if not flops or not seconds:
        return None
    own = flops / RECOMPUTES if given.recomputes else flops
    return own / seconds / speeds.peak_flops(given.dtype)
