"""Bounds from which a search knows, without a trace, what cannot fit and what cannot be quicker.

One process's trace has all of a step's work. However a run is spread, its devices share that work at best evenly, hold
at least their shares of the model's state, and send at least the gradients. Whatever a way adds (padding, gathered
blocks, messages between layers, work that is done twice) makes it slower and larger than the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from drivetrain.config.run import RunConfig
from drivetrain.plan.derive import Cut, Derivation
from drivetrain.plan.step_costs import Messages, Operations, StepCosts, StepMemory

CALLS = 16  # few enough to take no time by their number
STATE = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Extra:
    """The factors by which one process's operations grow with an option such as recompute, by (kind, dtype)."""

    calls: Mapping[tuple[str, str], float]
    flops: Mapping[tuple[str, str], float]
    bytes: Mapping[tuple[str, str], float]

    @classmethod
    def of(cls, without: StepCosts, with_it: StepCosts) -> Extra:
        """Compares two traces of the same cut."""
        quantities = ("calls", "flops", "bytes")
        before, after = ({name: _totals(each, name) for name in quantities} for each in (without, with_it))
        return cls(
            *(
                {key: max(1.0, after[name].get(key, 0.0) / value) for key, value in before[name].items() if value}
                for name in quantities
            )
        )

    def added_to(self, costs: StepCosts) -> StepCosts:
        operations = tuple(
            replace(
                each,
                calls=round(each.calls * self.calls.get((each.kind, each.dtype), 1.0)),
                flops=each.flops * self.flops.get((each.kind, each.dtype), 1.0),
                bytes=each.bytes * self.bytes.get((each.kind, each.dtype), 1.0),
            )
            for each in costs.operations
        )
        ranks = {rank: self.added_to(each) for rank, each in costs.by_rank.items()}
        return replace(costs, operations=operations, by_rank=ranks)


NOTHING = Extra({}, {}, {})


def state_bytes(run: RunConfig, whole: StepMemory) -> dict[str, int]:
    """Returns the least bytes of parameters, gradients and optimizer state on a device. whole: of one process."""
    shares = run.engine.shares(run.devices)
    return {
        "parameters": int(whole.parts.get("parameters", 0) * shares.parameters),
        "gradients": int(whole.parts.get("gradients", 0) * shares.gradients),
        "optimizer": int(whole.parts.get("optimizer", 0) * shares.optimizer),
    }


def model_parts(run: RunConfig, axis: str) -> int:
    """Returns into how many parts the model is cut for a message along an axis: by stages for one between the devices
    of a stage, by all that share a sample for one about parameters."""
    return run.engine.stages if axis in ("tp", "cp") else run.devices // run.data_parallel_size


def best_case(run: RunConfig, cut: Cut, one: Derivation, extra: Extra = NOTHING) -> StepCosts:
    """Returns costs that a step of the run has at the least. one: one process's traces in the same precision."""
    whole = extra.added_to(one.at(cut))
    beside = run.devices // run.data_parallel_size  # devices that share each sample
    state = state_bytes(run, whole.memory)
    held = sum(state.values())
    return replace(
        whole,
        memory=StepMemory(held, held, {name: state[name] for name in STATE}),  # type: ignore[misc]
        operations=tuple(_shared(each, run, beside) for each in whole.operations),
        messages=tuple(_sent(run, whole.memory)),
        origin="derived",
        by_rank={},
    )


def _shared(each: Operations, run: RunConfig, beside: int) -> Operations:
    """Returns the part of the work that one device has. Layers that are cut have as many calls, stages fewer."""
    share = run.engine.shares(run.devices).optimizer if each.kind == "optimizer" else 1 / beside
    return replace(
        each, calls=max(1, each.calls // run.engine.stages), flops=each.flops * share, bytes=each.bytes * share
    )


def _sent(run: RunConfig, whole: StepMemory) -> list[Messages]:
    """Returns the gradients' sum, and the parameters as often as they are gathered; in many calls, most of which may
    travel while the device computes."""
    ranks = run.data_parallel_size
    if ranks == 1:
        return []
    beside = run.devices // ranks
    stride = beside // run.engine.stages  # tensor ranks are neighbours, stages lie far apart
    shares = run.engine.shares(run.devices)
    gradients = whole.parts.get("gradients", 0) / beside
    if not shares.gathers:
        return [Messages("all_reduce", "dp", ranks, stride, CALLS, gradients)]
    # what is kept in fp32 may be sent in 16 bits: at least half of it
    gathered = shares.gathers * whole.parts.get("parameters", 0) / beside / 2
    return [
        Messages("reduce_scatter", "shard", ranks, stride, CALLS, gradients / 2),
        Messages("all_gather", "shard", ranks, stride, CALLS, gathered),
    ]


def _totals(costs: StepCosts, quantity: str) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for each in costs.operations:
        key = each.kind, each.dtype
        found[key] = found.get(key, 0.0) + getattr(each, quantity)
    return found
