"""Invented machines and an invented model, whose costs are formulas: a search over them can be checked exhaustively."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.errors import problem
from drivetrain.plan.memory import memory_of
from drivetrain.plan.step_costs import Messages, Operations, StepCosts, StepMemory
from drivetrain.plan.timeline import MemoryPart
from tests.plan.costs import made_timeline

KEPT = {False: 1.0, "selective": 0.4, True: 0.1}  # of activations
DONE_AGAIN = {False: 1.0, "selective": 1.04, True: 4 / 3}


@dataclass(frozen=True)
class Time:
    seconds: float
    bound_by: str


@dataclass(frozen=True)
class Model:
    """parameters in bytes of fp32; activations: bytes of one layer for one sample; flops: of one sample."""

    parameters: float
    layers: int
    activations: float
    flops: float


@dataclass
class Invented:
    """A machine as an Estimator."""

    model: Model
    nodes: int
    devices_per_node: int
    memory: int
    peak: float = 1e14  # FLOP/s
    bandwidth: float = 1e12  # bytes/s of memory
    link: float = 2e11  # between the devices of a node
    network: float = 1e10  # between nodes
    asked: list[RunConfig] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.nodes} x {self.devices_per_node} invented devices"

    no_speed = None
    host_memory = None
    at_once = 1

    def expect(self, runs: Iterable[RunConfig], quick: bool = False) -> None:  # noqa: ARG002
        for _ in runs:
            pass  # formulas take no time

    @property
    def host(self) -> Machine:
        return Machine("cuda", "invented", self.devices_per_node, self.memory, 8, (9, 0), frozenset({"bfloat16"}))

    def capacity(self, run: RunConfig) -> int:  # noqa: ARG002  all devices are alike
        return self.memory

    def unseen(self, run: RunConfig) -> tuple[int, int]:  # noqa: ARG002
        return 2**28, 2**29

    def costs(self, run: RunConfig, quick: bool = False) -> StepCosts:  # noqa: ARG002
        self.asked.append(run)
        if run.engine.axes.get("tp", 1) > 16:
            raise problem("engine.tp", "the model has 16 heads", "give at most 16")
        samples = math.ceil(run.step_samples / run.data_parallel_size)
        size = min(run.micro_batch_limit or samples, samples)
        count = math.ceil(samples / size)
        operations, messages = [*self._operations(run, samples, count)], [*self._messages(run, samples, count)]
        memory = self._memory(run, size, count)
        return StepCosts(memory, tuple(operations), tuple(messages), 1, 100 * run.step_samples, "traced", 0.0)

    def _memory(self, run: RunConfig, size: int, count: int) -> StepMemory:
        shares, axes = run.engine.shares(run.devices), run.engine.axes
        beside = axes.get("tp", 1) * axes.get("pp", 1)
        whole = self.model.parameters
        state: dict[MemoryPart, float] = {
            "parameters": whole * shares.parameters,
            "gradients": whole * shares.gradients,
            "optimizer": 2 * whole * shares.optimizer,
        }
        gathered = 0.0 if shares.gathers == 0 else 2 * whole / self.model.layers / beside
        layers = (
            self.model.activations * self.model.layers * KEPT[run.recompute] * (0.2 if run.offload_activations else 1.0)
        )
        if run.precision == "bf16-mixed":
            layers, gathered = layers * 0.6, gathered + whole / beside / 50
        forward = size * layers / beside * min(count, axes.get("pp", 1))
        one = size * self.model.activations / axes.get("tp", 1)
        kept = {name: round(value) for name, value in state.items()}
        before = {**kept, "gradients": 0} if count == 1 else kept
        stretches: list[tuple[str, dict[MemoryPart, int], float]] = [  # what stays, and what else there is
            ("forward", before, forward + gathered),
            ("backward", before, forward + gathered + 2 * one),  # the first gradient comes as the first layer goes
            ("backward", kept, gathered + 3 * one),
            ("optimizer", kept, whole / self.model.layers),
        ]
        timeline = made_timeline(*((phase, {**stays, "activations": round(more)}) for phase, stays, more in stretches))
        memory = memory_of(timeline)
        return replace(memory, reserved=round(memory.allocated * 1.02))

    def _operations(self, run: RunConfig, samples: int, count: int) -> Iterator[Operations]:
        shares, axes = run.engine.shares(run.devices), run.engine.axes
        stages, model = axes.get("pp", 1), self.model
        beside, again = stages * axes.get("tp", 1), DONE_AGAIN[run.recompute]
        dtype = "bfloat16" if run.precision == "bf16-mixed" else "float32"
        calls = max(1, 12 * model.layers * count // stages)
        flops, read = samples * model.flops * again / beside, 3 * count * model.parameters / beside
        yield Operations("matmul", dtype, calls, flops, read + samples * model.activations * again)
        moved = samples * model.layers * model.activations * again / beside * (8 if run.offload_activations else 2)
        yield Operations("memory", dtype, 2 * calls, moved, moved)
        yield Operations("optimizer", "float32", 4, 0.0, 5 * model.parameters * shares.optimizer)

    def _messages(self, run: RunConfig, samples: int, count: int) -> Iterator[Messages]:
        shares, axes = run.engine.shares(run.devices), run.engine.axes
        tp, stages, dp = axes.get("tp", 1), axes.get("pp", 1), run.data_parallel_size
        part, hidden = self.model.parameters / (tp * stages), self.model.activations / 30
        layers = self.model.layers
        if dp > 1 and not shares.gathers:
            yield Messages("all_reduce", "dp", dp, tp, layers, part)
        elif dp > 1:
            yield Messages("reduce_scatter", "dp", dp, tp, layers, part)
            each_time = count if shares.parameters < 1 / (tp * stages) else 1
            yield Messages("all_gather", "dp", dp, tp, layers * each_time, part * shares.gathers * each_time)
        if tp > 1:
            calls = 4 * layers * count // stages or 1
            yield Messages("all_reduce", "tp", tp, 1, calls, 4 * layers / stages * samples * hidden)
        if stages > 1:
            yield Messages("send", "pp", stages, tp * dp, 2 * count, 2 * samples * hidden)

    def time(self, run: RunConfig, costs: StepCosts) -> Time:
        computed = sum(self._seconds(each) for each in costs.operations)
        sent = {axis: self._sent(costs, axis) for axis in ("dp", "tp", "pp")}
        sent["dp"] += self._sent(costs, "shard")  # of bounds
        stages = run.engine.stages
        samples = math.ceil(run.step_samples / run.data_parallel_size)
        count = math.ceil(samples / min(run.micro_batch_limit or samples, samples))
        busy = (computed + sent["tp"]) * (1 + (stages - 1) / count)
        seconds = max(busy, sent["dp"]) + 0.2 * min(busy, sent["dp"]) + sent["pp"]
        return Time(seconds, "network" if sent["dp"] + sent["tp"] > computed else "compute")

    def _seconds(self, each: Operations) -> float:
        peak = self.peak * (4 if each.dtype == "bfloat16" else 1)
        return max(each.flops / peak, each.bytes / self.bandwidth) + each.calls * 5e-6

    def _sent(self, costs: StepCosts, axis: str) -> float:
        total = 0.0
        for each in costs.messages:
            if each.axis == axis:
                leaves = (each.ranks - 1) * each.stride >= self.devices_per_node
                speed = self.network if leaves else self.link
                factor = {"all_reduce": 2.0, "send": 1.0}.get(each.collective, 1.0) * (each.ranks - 1) / each.ranks
                total += each.bytes * factor / speed + each.calls * 1e-5
        return total


def machine(seed: int) -> Invented:
    """Returns one of many machines with a model that may or may not fit it."""
    chance = random.Random(seed)
    model = Model(
        parameters=2 ** chance.uniform(28, 37),
        layers=chance.choice([12, 24, 48, 80]),
        activations=2 ** chance.uniform(20, 28),
        flops=2 ** chance.uniform(36, 46),
    )
    return Invented(
        model,
        nodes=chance.choice([1, 1, 2, 4, 8]),
        devices_per_node=chance.choice([1, 2, 4, 8]),
        memory=chance.choice([16, 24, 40, 80]) * 2**30,
        peak=2 ** chance.uniform(43, 48),
        link=2 ** chance.uniform(34, 39),
        network=2 ** chance.uniform(30, 36),
    )
